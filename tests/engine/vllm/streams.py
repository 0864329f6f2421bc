"""A store of names only, and requests as vLLM's scheduler would hand them over."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cache_store.keys import KVSpec
from cache_store.results import Match
from engine.vllm.plan import BlendPlan
from engine.vllm.scheduler import BlendScheduler
from engine.vllm.settings import ConnectorSettings
from engine.vllm.summary import RunSummary, segments_of

SPEC = KVSpec("m" * 64, "t" * 64, 4, 2, 8, "fp32")
BLOCK = 16


class Names:
    """A store that knows which chunks it has, and nothing of their KV."""

    def __init__(self, stored: Iterable[Sequence[int]] = (), *, read_only: bool = False) -> None:
        self.stored = {tuple(ids) for ids in stored}
        self.read_only = read_only
        self.here: set[tuple[int, ...]] = (
            set()
        )  # of a store with a remote: what it need not ask for
        self.counted: list[str] = []
        self.damaged: list[str] = []
        self.notes: list[str] = []
        self.finds = 0
        self.broken: Exception | None = None
        self.counters = SimpleNamespace(add=self.counted.append, flush=lambda: None)

    def look_ahead(self, spec: object, chunks: object, seconds: object = None) -> None:
        self._check()

    def find(self, spec: object, token_ids: Sequence[int], context: Any, **_: Any) -> Match | None:
        self._check()
        self.finds += 1
        if tuple(token_ids) not in self.stored:
            return None
        return Match(str(hash(tuple(token_ids))), 1, 0, False, (), "")

    def find_here(
        self, spec: object, token_ids: Sequence[int], context: Sequence[int], **_: Any
    ) -> Match | None:
        if tuple(token_ids) not in self.here:
            return None
        return Match(str(hash(tuple(token_ids))), 1, 0, not context, (), "")

    def bring(self, wanted: Any) -> set[str]:
        self._check()
        return {key for _, key in wanted}

    def reason_for_miss(self, *_: Any, **__: Any) -> str:
        self._check()
        return "absent"

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes

    def note_uses(self) -> None:
        return

    def pinned(self, keys: object) -> Any:
        return nullcontext()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


@dataclass
class FakeRequest:
    """The fields of vLLM's request that the connector's scheduler reads and sets."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any = None
    cache_salt: str | None = None
    status: Any = field(default_factory=lambda: SimpleNamespace(name="FINISHED_STOPPED"))
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    resumable: bool = False
    block_hashes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """As vLLM: of full blocks, each of all before it and the salt."""
        ids = tuple(self.prompt_token_ids or ())
        for end in range(BLOCK * (len(self.block_hashes) + 1), len(ids) + 1, BLOCK):
            self.block_hashes.append(hash((self.cache_salt, ids[:end])))


def chunk(number: int, tokens: int = 40) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + tokens))


def request(
    name: str,
    chunks: Sequence[Sequence[int]],
    question: Sequence[int] = (7, 8, 9),
    prefix: Sequence[int] = (1, 2, 3),
    *,
    salt: str | None = None,
    **wishes: Any,
) -> FakeRequest:
    ids = [*prefix, *(token for ids in chunks for token in ids), *question]
    listed = [{"kind": "prefix", "tokens": len(prefix)}]
    listed += [{"kind": "chunk", "tokens": len(ids)} for ids in chunks]
    own = {"segments": listed, **wishes}
    return FakeRequest(name, ids, {"cacheblend": own}, cache_salt=salt)


def scheduler(store: Names, *, idles: bool = True, clock: Any = None, **settings: Any) -> Any:
    given = {"store": "/nowhere", "policy": "value", "min_tokens": 0} | settings
    rope = SimpleNamespace(regime=lambda length: "")
    more = {} if clock is None else {"clock": clock}
    return BlendScheduler(
        ConnectorSettings.of(given),
        *(store, SPEC, rope, ()),  # type: ignore[arg-type]
        idles=idles,
        **more,
    )


def result(plan: BlendPlan, **fields: Any) -> RunSummary:
    """What a worker that did this would say."""
    prompt = plan.request.prompt
    told = dict(held=plan.held, end=plan.request.end, outcome="blended") | fields
    return RunSummary(
        plan.request.request_id,
        options=plan.request.options,
        segments=segments_of(plan.sources),
        prompt_tokens=len(prompt.token_ids),
        **told,  # type: ignore[arg-type]
    )
