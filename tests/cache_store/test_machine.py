"""Whatever happens to a store, in any order: a hit gives the bytes that were put, the limit holds,
nothing that is to stay is evicted, and damage is found and mended. Against a plain dictionary."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.archive import ArchiveReader
from cache_store.catalog import ChunkText
from cache_store.checking import check_entries
from cache_store.entry import read_header
from cache_store.errors import DamagedEntry, NotFoundError, StoreFullError
from cache_store.exporting import export_to, plan_export
from cache_store.group import Member, ranked
from cache_store.importing import Import
from cache_store.keys import chunk_id, entry_key, group_key
from cache_store.prune import PruneChoice, plan_prune, prune
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, du, file_of, flip, make_layers, read, scaled

LIMIT = 6 * 2**20
TEXTS = [f"text {n}" for n in range(6)]
IDS = {text: (n + 1,) * 14 for n, text in enumerate(TEXTS)}  # 450 kB each
LAYERS = {text: make_layers(BIG, 14, n) for n, text in enumerate(TEXTS)}
SOURCES = ["a.md", "b.md", "c.md"]
CONTEXTS = st.sampled_from([(), (1,), (1, 2), (3,)])
REGIMES = st.sampled_from(["", "long"])
INDEX = Path("kv/cache.db")
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """What was put. fault: how it was damaged since: in a layer, in the header, or all of it."""

    text: str
    context: Ids
    regime: str
    saved: bool = False
    fault: str = ""

    @property
    def key(self) -> str:
        return entry_key(group_key(BIG, IDS[self.text]), self.context, self.regime)


@dataclass(frozen=True)
class Document:
    texts: tuple[str, ...]
    pinned: bool = False


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "store"
        self.limit, self.policy = LIMIT, "lru"
        self.store = ChunkStore.open(self.root, limit_bytes=LIMIT)
        self.entries: dict[str, Entry] = {}
        self.documents: dict[str, Document] = {}
        self.protected: set[str] = set()
        self.copies = 0

    def teardown(self) -> None:
        self.repair()
        self.store.close()
        shutil.rmtree(self.folder)

    def pinned(self) -> set[str]:
        texts = {t for d in self.documents.values() if d.pinned for t in d.texts}
        return {key for key, entry in self.entries.items() if entry.text in texts}

    def damaged(self) -> set[str]:
        return {key for key, entry in self.entries.items() if entry.fault}

    def see_what_went(self, *, by_saved: bool = False, keep: set[str] | None = None) -> None:
        """What is gone may go, and in its turn."""
        left = {entry.key for entry in self.store.entries()}
        gone = self.entries.keys() - left
        staying = self.protected | self.pinned() | (keep or set())
        assert not gone & staying
        assert not gone or self.policy != "none"
        one_off = {key for key in self.entries if self.entries[key].saved}
        if by_saved:
            assert gone <= one_off
        if gone - one_off:
            assert not (one_off & left) - staying
        for key in gone:
            del self.entries[key]

    def draw(self, data: st.DataObject, *faults: str) -> Entry:
        some = [e for e in self.entries.values() if not faults or e.fault in faults]
        return data.draw(st.sampled_from(sorted(some, key=lambda e: e.key)))

    # Entries.

    @rule(text=st.sampled_from(TEXTS), context=CONTEXTS, regime=REGIMES, saved=st.booleans())
    def put(self, text: str, context: Ids, regime: str, saved: bool) -> None:
        entry = Entry(text, context, regime, saved)
        known = self.entries.get(entry.key)
        there = known is not None and known.fault in ("", "layer")
        free = self.policy != "none" and not self.protected and not self.pinned() and not saved
        try:
            key = self.store.put(
                BIG, IDS[text], context, regime, LAYERS[text], chunk_id=chunk_id(text), saved=saved
            )
        except StoreFullError:
            assert not there
            assert not free
            assert {e.key for e in self.store.entries()} == self.entries.keys()  # none for nothing
            return
        assert key == entry.key
        if known is not None and there:
            self.entries[key] = replace(known, saved=known.saved and saved)
        else:
            self.entries[key] = entry
        self.see_what_went(by_saved=saved, keep={key})

    @rule(
        text=st.sampled_from(TEXTS), context=CONTEXTS, regime=REGIMES, strict=st.none() | CONTEXTS
    )
    def find(self, text: str, context: Ids, regime: str, strict: Ids | None) -> None:
        usable = [
            Member(key, entry.context, entry.regime)
            for key, entry in self.entries.items()
            if entry.text == text and entry.fault in ("", "layer")
        ]
        wanted = ranked(usable, context, regime, strict)
        match = self.store.find(BIG, IDS[text], context, regime=regime, strict_context=strict)
        assert (match.key if match else None) == (wanted[0].key if wanted else None)
        exact = Entry(text, context, regime).key in {member.key for member in usable}
        assert self.store.contains(BIG, IDS[text], context, regime) == exact
        if match is None:
            return
        assert match.exact == (match.key == Entry(text, context, regime).key)
        if self.entries[match.key].fault:
            try:
                read(self.store, match.key)
                raise AssertionError("damage was not seen")
            except DamagedEntry:
                assert self.store.discard(match.key) > 0
                del self.entries[match.key]
        else:
            header, layers = read(self.store, match.key)
            assert (header.token_ids, header.context) == (IDS[text], match.context)
            assert layers == LAYERS[text]

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        entry = self.draw(data)
        assert self.store.discard(entry.key) > 0
        del self.entries[entry.key]

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def protect(self, data: st.DataObject) -> None:
        entry = self.draw(data)
        self.store.protect(entry.key)
        self.protected.add(entry.key)
        self.entries[entry.key] = replace(entry, saved=False)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), number=st.integers(1, 3))
    def put_more_while_some_are_in_use(self, data: st.DataObject, number: int) -> None:
        entry = self.draw(data)
        with self.store.pinned([entry.key]):
            for n in range(number):
                with contextlib.suppress(StoreFullError):
                    self.store.put(BIG, [90 + n] * 14, (), "", LAYERS[TEXTS[n]])
                self.see_what_went(keep={entry.key})
        for n in range(number):
            self.store.discard(entry_key(group_key(BIG, [90 + n] * 14), (), ""))

    # Documents.

    @rule(
        source=st.sampled_from(SOURCES),
        texts=st.lists(st.sampled_from(TEXTS), max_size=4, unique=True),
    )
    def replace_document(self, source: str, texts: list[str]) -> None:
        rows = [ChunkText(chunk_id(t), t, 0, len(t), 14) for t in texts]
        try:
            self.store.catalog.replace_document(source, f"digest of {texts}", "{}", rows)
        except StoreFullError:
            pass
        else:
            pinned = source in self.documents and self.documents[source].pinned
            self.documents[source] = Document(tuple(texts), pinned)
        self.see_what_went()

    @rule(source=st.sampled_from(SOURCES))
    def remove_document(self, source: str) -> None:
        assert self.store.catalog.remove_document(source) == (source in self.documents)
        self.documents.pop(source, None)

    @rule(source=st.sampled_from(SOURCES), pinned=st.booleans())
    def pin(self, source: str, pinned: bool) -> None:
        known = self.documents.get(source)
        changes = known is not None and known.pinned != pinned
        assert self.store.pins.pin([source], pinned) == changes
        if known is not None:
            self.documents[source] = replace(known, pinned=pinned)

    # The store.

    @rule(limit=st.integers(4, 9))
    def set_limit(self, limit: int) -> None:
        try:
            self.store.set_limit(limit * 2**20)
        except StoreFullError:
            assert self.protected or self.pinned() or self.policy == "none"
        else:
            self.limit = limit * 2**20
        self.see_what_went()

    @rule(policy=st.sampled_from(["lru", "lfu", "none"]))
    def set_eviction(self, policy: str) -> None:
        self.store.set_eviction(policy)
        self.policy = policy

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = ChunkStore.open(self.root)
        self.protected.clear()

    @rule(data=st.data(), over=st.sampled_from([None, 2**20, 3 * 2**20]))
    def prune(self, data: st.DataObject, over: int | None) -> None:
        known = {t for d in self.documents.values() for t in d.texts}
        orphans = {key for key, entry in self.entries.items() if entry.text not in known}
        pinned = self.pinned()
        choice = PruneChoice(orphans=True) if over is None else PruneChoice(over=over)
        plan = plan_prune(self.store, choice)
        done = prune(self.store, plan)
        gone = self.entries.keys() - {entry.key for entry in self.store.entries()}
        assert not gone & pinned
        if over is None:
            assert gone == orphans - pinned
        elif plan.excess is not None and done.nbytes < plan.excess:
            assert gone == self.entries.keys() - pinned
        for key in gone:
            del self.entries[key]

    @precondition(lambda self: self.entries and not self.damaged())
    @rule()
    def move_to_a_fresh_store(self) -> None:
        texts = {text for document in self.documents.values() for text in document.texts}
        # What only prompts saved stays behind.
        moved = {k: e for k, e in self.entries.items() if not e.saved or e.text in texts}
        if not moved and not self.documents:
            with pytest.raises(NotFoundError):
                plan_export(self.store, None, None)
            return
        sink = io.BytesIO()
        export_to(self.store, plan_export(self.store, None, None), sink, lambda done: None)
        self.protected |= moved.keys()
        self.entries |= {key: replace(entry, saved=False) for key, entry in moved.items()}
        self.copies += 1
        sink.seek(0)
        with ChunkStore.open(self.folder / f"copy {self.copies}", limit_bytes=2**26) as copy:
            report = Import(copy, ArchiveReader(sink)).run()
            assert (report.entries, report.documents) == (len(moved), len(self.documents))
            self.holds_what_was_put(copy, moved)
            assert copy.verify().problems == ()

    # Damage.

    @precondition(lambda self: any(not entry.fault for entry in self.entries.values()))
    @rule(data=st.data(), how=st.sampled_from(["layer", "header", "cut", "gone", "longer"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        entry = self.draw(data, "")
        path = file_of(self.store, entry.key)
        size = path.stat().st_size
        header = read_header(path).header_bytes
        if how == "layer":
            flip(path, data.draw(st.integers(header, size - 1)))
        elif how == "header":
            flip(path, data.draw(st.integers(0, header - 1)))
        elif how == "cut":
            os.truncate(path, data.draw(st.integers(0, size - 1)))
        elif how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes() + b"\0")
        self.entries[entry.key] = replace(entry, fault="layer" if how == "layer" else "file")

    @rule()
    def ingest_again(self) -> None:
        """Checks all that is there, and puts what was damaged."""
        found = check_entries(self.store, list(self.entries), lambda done: None)
        assert found.damaged.keys() == self.damaged()
        assert found.entries == len(self.entries)
        for key in found.damaged:
            entry = self.entries[key]
            assert self.store.discard_damaged(key)
            assert not self.store.discard_damaged(key)
            del self.entries[key]
            self.put(entry.text, entry.context, entry.regime, False)

    @rule()
    def verify(self) -> None:
        found = self.store.verify()
        assert {problem.where for problem in found.problems} == self.damaged()
        assert found.ok == len(self.entries) - len(self.damaged())

    @rule()
    def repair(self) -> None:
        bad = self.damaged()
        found = self.store.verify(repair=True)
        assert {problem.where for problem in found.problems} == bad
        self.entries = {key: e for key, e in self.entries.items() if key not in bad}
        assert self.store.verify().problems == ()

    @rule(how=st.sampled_from(["lost", "random", "cut", "emptied"]), data=st.data())
    def damage_the_index(self, how: str, data: st.DataObject) -> None:
        self.store.close()
        path = self.root / INDEX
        if how == "lost":
            path.unlink()
        elif how == "random":
            path.write_bytes(data.draw(st.randoms()).randbytes(path.stat().st_size))
        else:
            os.truncate(path, 0 if how == "emptied" else path.stat().st_size // 2)
        there = any(self.root.glob("kv/*.kv"))
        with ChunkStore.open(self.root, on_damage="go_on", limit_bytes=self.limit) as store:
            assert bool(store.faults) or not there or how == "cut"
            for entry in self.entries.values():
                if store.faults:
                    assert store.find(BIG, IDS[entry.text], entry.context) is None
        self.store = ChunkStore.open(self.root, on_damage="mend", limit_bytes=self.limit)
        self.protected.clear()
        if how in ("lost", "random") and there:
            assert self.store.mended
        mended = {problem.where for problem in self.store.mended}
        if "kv/cache.db" not in mended:
            assert not there or how == "cut"
        self.store.mended = ()  # verify would tell of it once more
        self.limit = self.store.limit
        # What prompts alone had saved is not known any more, and files without header are gone.
        self.entries = {
            key: replace(entry, saved=False)
            for key, entry in self.entries.items()
            if entry.fault != "file"
        }

    # What always holds.

    def holds_what_was_put(
        self, store: ChunkStore, entries: dict[str, Entry] | None = None
    ) -> None:
        """entries: those that are to be there; None: all of them."""
        entries = self.entries if entries is None else entries
        assert {entry.key for entry in store.entries()} == entries.keys()
        for key, entry in entries.items():
            if not entry.fault:
                assert read(store, key)[1] == LAYERS[entry.text]
        found = {d.source: d for d in store.catalog.documents()}
        assert found.keys() == self.documents.keys()
        for source, document in self.documents.items():
            assert [c.text for c in store.catalog.chunks(source)] == list(document.texts)

    @invariant()
    def as_expected(self) -> None:
        self.holds_what_was_put(self.store)
        told: dict[str, Any] = {entry.key: entry for entry in self.store.entries()}
        for key, entry in self.entries.items():
            assert told[key].saved == entry.saved
        pinned = {source for source, document in self.documents.items() if document.pinned}
        assert set(self.store.pins.documents()) == pinned
        assert self.store.limit == self.limit
        assert du(self.root) <= self.limit


StoreMachine.TestCase.settings = settings(
    max_examples=scaled(20),
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes
    derandomize=scaled(1) == 1,
    suppress_health_check=list(HealthCheck),
)
TestStore = StoreMachine.TestCase
