"""Any sequence of operations: the store does what a dictionary would."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.group import Member, ranked
from cache_store.keys import entry_key, group_key
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, Layers, file_of, flip, make_layers, read

LIMIT = 6 * 2**20
TOKENS = st.sampled_from([(1,), (1, 2), (2,) * 16])
CONTEXTS = st.sampled_from([(), (1,), (1, 2), (3,)])
REGIMES = st.sampled_from(["", "long"])
_LAYERS = {length: make_layers(BIG, length) for length in (1, 2, 16)}

Entry = tuple[tuple[int, ...], tuple[int, ...], str]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = ChunkStore.open(self.folder / "store", limit_bytes=LIMIT)
        self.model: dict[str, Entry] = {}
        self.order: list[str] = []  # by last use

    def teardown(self) -> None:
        assert self.store.verify().problems == ()
        self.store.close()
        shutil.rmtree(self.folder)

    def used(self, key: str) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    def key(self, entry: Entry) -> str:
        return entry_key(group_key(BIG, entry[0]), entry[1], entry[2])

    def layers(self, ids: tuple[int, ...]) -> Layers:
        return _LAYERS[len(ids)]

    def see_what_was_evicted(self) -> None:
        """What is gone must be what was used longest ago."""
        left = {entry.key for entry in self.store.entries()}
        gone = [key for key in self.order if key not in left]
        assert gone == self.order[: len(gone)]
        for key in gone:
            self.order.remove(key)
            del self.model[key]

    @rule(ids=TOKENS, context=CONTEXTS, regime=REGIMES)
    def put(self, ids: tuple[int, ...], context: tuple[int, ...], regime: str) -> None:
        key = self.store.put(BIG, ids, context, regime, self.layers(ids))
        assert key == self.key((ids, context, regime))
        self.model[key] = (ids, context, regime)
        self.used(key)
        self.see_what_was_evicted()

    @rule(start=st.integers(0, 50))
    def put_many_large_ones(self, start: int) -> None:
        for ids in ((start + n,) * 16 for n in range(3)):
            self.put(ids, (), "")

    @rule(ids=TOKENS, context=CONTEXTS, regime=REGIMES, strict=st.none() | CONTEXTS)
    def find(
        self,
        ids: tuple[int, ...],
        context: tuple[int, ...],
        regime: str,
        strict: tuple[int, ...] | None,
    ) -> None:
        members = [
            Member(key, entry[1], entry[2]) for key, entry in self.model.items() if entry[0] == ids
        ]
        wanted = ranked(members, context, regime, strict)
        match = self.store.find(BIG, ids, context, regime=regime, strict_context=strict)
        assert (match.key if match else None) == (wanted[0].key if wanted else None)
        exact = self.key((ids, context, regime)) in self.model
        assert self.store.contains(BIG, ids, context, regime) == exact
        if match is not None:
            if strict is None:
                assert match.exact == exact
            assert read(self.store, match.key)[1] == self.layers(ids)
            self.used(match.key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        assert self.store.discard(key) > 0
        del self.model[key]
        self.order.remove(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage_and_repair(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        flip(file_of(self.store, key), data.draw(st.integers(-100, 100)))
        assert [problem.where for problem in self.store.verify(repair=True).problems] == [key]
        del self.model[key]
        self.order.remove(key)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = ChunkStore.open(self.folder / "store")

    @invariant()
    def as_expected(self) -> None:
        found = {entry.key: entry for entry in self.store.entries()}
        assert found.keys() == self.model.keys()
        for key, (ids, context, regime) in self.model.items():
            entry = found[key]
            assert (entry.tokens, entry.context_tokens, entry.regime) == (
                len(ids),
                len(context),
                regime,
            )
        assert self.store.used_bytes() <= LIMIT


StoreMachine.TestCase.settings = settings(
    max_examples=10,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStore = StoreMachine.TestCase
