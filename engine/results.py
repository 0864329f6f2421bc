"""What a run returns. `AskResult.to_json` is the documented schema 1 of `ask --json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cache_store.misses import MissReason
from engine.codec import precision
from engine.prompt import SegmentKind
from engine.sources import Status
from engine.timing import LayerTime
from engine.trace.record import Trace
from engine.trace.recording import completed


@dataclass(frozen=True)
class ModelInfo:
    name: str
    fingerprint: str
    dtype: str
    kv_dtype: str
    device: str

    @property
    def precision(self) -> str:
        """See `engine.codec.precision`."""
        return precision(self.dtype, self.kv_dtype)


@dataclass(frozen=True)
class SegmentRecord:
    """A segment's place and where its KV came from; reason: of a miss, see
    `cache_store.misses`."""

    kind: SegmentKind
    chunk_id: str | None
    source: str | None
    start: int
    end: int
    status: Status
    reason: MissReason | None = None


@dataclass(frozen=True)
class PromptRecord:
    token_ids: tuple[int, ...]
    segments: tuple[SegmentRecord, ...]


@dataclass(frozen=True)
class Recomputed:
    """tokens: cached tokens computed to the last layer; fraction: of the cached tokens;
    per_layer: cached tokens that got fresh K and V at each layer."""

    tokens: int
    fraction: float
    per_layer: tuple[int, ...]


@dataclass(frozen=True)
class FirstToken:
    """The first output token and the most likely ones: (id, natural-log probability)."""

    id: int
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timing:
    """Seconds. ttft_s: prompt ids ready -> first output token's logits ready; kv_load_s: finding,
    opening and reading stored KV, added up over threads; kv_stall_s: what of it nothing was
    computed during; layers: those layer by layer, finding and opening left out."""

    load_model_s: float
    tokenize_s: float
    retrieve_s: float
    ttft_s: float
    kv_load_s: float
    kv_stall_s: float
    rotate_s: float
    score_s: float
    recompute_s: float
    decode_s: float
    total_s: float
    layers: tuple[LayerTime, ...]


@dataclass(frozen=True)
class KVRecord:
    """Stored KV that was loaded. tier: memory, disk or remote, "mixed" where it was several, "none"
    where nothing was loaded; tiers: bytes by tier."""

    bytes_loaded: int
    tier: str
    tiers: Mapping[str, int]

    @classmethod
    def of(cls, tiers: Mapping[str, int]) -> "KVRecord":
        """From the bytes by tier."""
        names = [name for name, size in tiers.items() if size]
        tier = "mixed" if len(names) > 1 else names[0] if names else "none"
        return cls(sum(tiers.values()), tier, dict(tiers))


@dataclass(frozen=True)
class Comparison:
    """Against a full prefill of the same ids in the same process. KL(full || blend) in nats,
    mean and agreement teacher-forced along full prefill's greedy answer."""

    ttft_s: float
    speedup: float
    kl_first: float
    kl_mean: float
    top1_agreement: float
    first_divergence: int | None
    answer: str


@dataclass(frozen=True)
class Audited:
    """As in `Comparison`, of a prompt that was audited after its answer; see `engine.audit`."""

    kl_first: float
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class AskResult:
    """One answered prompt. engine: what computed it, torch or vllm. first_token: None where nobody
    knows it, as in a trace that a worker of vLLM's server wrote. selected: prompt positions
    recomputed to the last layer; notes: what the caller should be told (damaged entries, chunks not
    saved); trace: the run's record, where one was asked for: these three are not in the JSON."""

    answer: str
    finish_reason: str
    output_token_ids: tuple[int, ...]
    model: ModelInfo
    mode: str
    policy: str
    ratios: tuple[float, ...]
    threshold: float | None
    transfer: bool
    check_layers: tuple[int, ...]
    skipped_blend: str | None
    prompt: PromptRecord
    recomputed: Recomputed
    first_token: FirstToken | None
    timing: Timing
    kv: KVRecord
    compare: Comparison | None
    audit: Audited | None = None
    selected: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())
    trace: Trace | None = field(default=None, compare=False, repr=False)
    engine: str = "torch"

    def timed(self, timing: Timing) -> "AskResult":
        """The same with other times, in its trace too."""
        result = replace(self, timing=timing)
        if self.trace is None:
            return result
        return replace(result, trace=completed(self.trace, result.to_json(), timing))

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings, in the order of the documented schema."""
        raw = asdict(replace(self, trace=None))
        del raw["selected"], raw["notes"], raw["trace"]
        return {"schema": 1, "engine": raw.pop("engine"), **raw}
