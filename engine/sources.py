"""Which stored KV serves which segment of a prompt."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cache_store.counters import Counters
from cache_store.keys import KVSpec
from cache_store.misses import MissReason
from cache_store.store import Match
from engine.options import Mode
from engine.prompt import Prompt, Segment

Status = Literal["exact", "hit", "miss", "computed", "kept"]
"""exact, hit: stored KV was loaded; miss, computed: it was computed; kept: it was in the KV cache
already."""


class LayerReader(Protocol):
    """One stored entry: `layer(i)` gives K and V as buffers, checked against their checksum.
    tier: where they come from: memory, disk or remote."""

    tier: str

    def layer(self, index: int) -> tuple[memoryview, memoryview]: ...

    def close(self) -> None: ...


class FindsKV(Protocol):
    """See `cache_store.store.ChunkStore.find`."""

    def find(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None: ...


class KVStore(FindsKV, Protocol):
    """What the engine needs of a store; `cache_store.store.ChunkStore` is one."""

    @property
    def damaged(self) -> list[str]:
        """One line for each damaged entry passed over so far."""

    @property
    def read_only(self) -> bool: ...

    def look_ahead(
        self, spec: KVSpec, chunks: Iterable[Sequence[int]], seconds: float | None = None
    ) -> None: ...

    def take_notes(self) -> list[str]: ...

    def find_here(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None: ...

    def open_entry(self, key: str) -> LayerReader: ...

    def put(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        regime: str,
        layers: Sequence[tuple[Any, Any]],
        *,
        chunk_id: str = "",
        saved: bool = False,
    ) -> str: ...

    def contains(
        self, spec: KVSpec, token_ids: Sequence[int], context: Sequence[int], regime: str = ""
    ) -> bool: ...

    def bring(self, wanted: Sequence[tuple[str, str]]) -> set[str]: ...

    def discard(self, key: str) -> Any: ...

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[Any]: ...

    def reason_for_miss(
        self, spec: KVSpec, token_ids: Sequence[int], chunk_id: str, *, strict: bool = False
    ) -> MissReason: ...

    def note_uses(self) -> None: ...

    @property
    def counters(self) -> Counters: ...


@dataclass(frozen=True)
class Source:
    """A segment and, where its KV is to be loaded, the stored entry it comes from."""

    segment: Segment
    status: Status
    match: Match | None = None

    @property
    def cached(self) -> bool:
        """Whether these are a chunk's tokens whose KV was loaded."""
        return self.segment.kind == "chunk" and self.match is not None

    def computed(self) -> "Source":
        """What becomes of it where stored KV is not used after all."""
        return self if self.status in ("miss", "kept") else Source(self.segment, "computed")


def find_sources(
    prompt: Prompt, store: FindsKV | None, spec: KVSpec, regime: str, mode: Mode, strict: bool
) -> tuple[Source, ...]:
    """One source a segment. Separators and the suffix are always computed.

    What is kept needs none. Mode `full` loads nothing; `prefix` loads only the leading run of exact
    segments. strict: KV computed behind another prefix than this prompt's is a miss.
    """
    kept = tuple(Source(s, "kept") for s in prompt.segments if s.end <= prompt.kept)
    new = prompt.segments[len(kept) :]
    if mode == "full" or store is None:
        missing: Status = "computed" if mode == "full" else "miss"
        return kept + tuple(
            Source(segment, missing if segment.kind == "chunk" else "computed") for segment in new
        )
    sources = list(kept)
    leading = True  # still within the exact leading part
    for segment in new:
        source = Source(segment, "computed")
        if segment.kind in ("prefix", "chunk") and (mode != "prefix" or leading):
            match = store.find(
                spec,
                segment.token_ids,
                prompt.before(segment),
                regime=regime,
                strict_context=prompt.prefix_ids if strict and segment.kind == "chunk" else None,
            )
            if match is not None and match.exact:
                source = Source(segment, "exact", match)
            elif segment.kind == "chunk" and mode != "prefix":
                source = Source(segment, "hit" if match else "miss", match)
        leading = leading and source.status == "exact"
        sources.append(source)
    return tuple(sources)
