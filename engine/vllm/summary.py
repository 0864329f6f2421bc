"""What was done for one request: plain numbers and tuples, for the client, metrics and traces."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cache_store.misses import MissReason
from engine.options import BlendOptions
from engine.prompt import SegmentKind
from engine.sources import Source, Status

Outcome = Literal["blended", "held", "full", "failed"]
"""blended: its KV was blended. held: it was blended before and is still in vLLM's blocks. full:
vLLM computed it. failed: it could not be blended, and vLLM computed it."""


@dataclass(frozen=True)
class SegmentSummary:
    """Tokens [start, end) of a prompt, and where their KV came from; reason: of a miss."""

    kind: SegmentKind
    chunk_id: str | None
    source: str | None
    start: int
    end: int
    status: Status
    reason: MissReason | None = None


@dataclass(frozen=True)
class Seconds:
    """Of one blend, as in `engine.timing.Stopwatch`; total: from its beginning to its KV being in
    vLLM's blocks."""

    load: float = 0.0
    stall: float = 0.0
    rotate: float = 0.0
    score: float = 0.0
    recompute: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class RunSummary:
    """One request that names chunks.

    outcome: see `Outcome`. why: one line, where it was not blended. end: vLLM itself computed the
    prompt from there on. held: so many leading tokens of it were in vLLM's blocks already.
    segments: those of the whole prompt, as they were used; none where all was held. recomputed:
    cached tokens computed to the last layer; selected: at which positions; per_layer: cached tokens
    that got fresh K and V at each layer. tiers: bytes loaded, by tier. notes: what the user should
    know. saving: so many missed chunks are stored after the request.
    """

    request_id: str
    outcome: Outcome
    options: BlendOptions
    segments: tuple[SegmentSummary, ...]
    prompt_tokens: int
    end: int = 0
    held: int = 0
    why: str | None = None
    recomputed: int = 0
    per_layer: tuple[int, ...] = ()
    selected: tuple[int, ...] = field(default=(), repr=False)
    seconds: Seconds = Seconds()
    tiers: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    saving: int = 0

    def tokens(self, status: Status) -> int:
        """How many tokens of chunks have this status."""
        mine = (s for s in self.segments if s.kind == "chunk" and s.status == status)
        return sum(s.end - s.start for s in mine)

    @property
    def cached_tokens(self) -> int:
        return self.tokens("hit") + self.tokens("exact")

    @property
    def bytes_loaded(self) -> int:
        return sum(size for _, size in self.tiers)

    def to_json(self) -> dict[str, Any]:
        """What a client is told: dicts, lists, numbers and strings."""
        o, cached = self.options, self.cached_tokens
        return {
            "status": self.outcome,
            "why": self.why,
            "mode": o.mode,
            "policy": o.policy,
            "ratios": [float(r) for r in o.ratios],
            "threshold": None if o.threshold is None else float(o.threshold),
            "prompt_tokens": self.prompt_tokens,
            "chunk_tokens": {
                "cached": cached,
                "exact": self.tokens("exact"),
                "hit": self.tokens("hit"),
                "miss": self.tokens("miss"),
            },
            "held_tokens": self.held,
            "recomputed": {
                "tokens": self.recomputed,
                "fraction": self.recomputed / cached if cached else 0.0,
                "per_layer": list(self.per_layer),
            },
            "seconds": asdict(self.seconds),
            "bytes": dict(self.tiers),
            "segments": [asdict(segment) for segment in self.segments],
            "saving": self.saving,
            "notes": list(self.notes),
        }


def segments_of(
    sources: Sequence[Source], reasons: Sequence[MissReason | None] = ()
) -> tuple[SegmentSummary, ...]:
    """sources: one a segment; reasons: as many, or none."""
    known = reasons or (None,) * len(sources)
    return tuple(
        SegmentSummary(s.kind, s.chunk_id, s.source, s.start, s.end, source.status, reason)
        for source, reason in zip(sources, known, strict=True)
        for s in [source.segment]
    )
