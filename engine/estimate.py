"""What a prompt, an ingest and their KV will take: sizes from shapes, times from a probe.

Times are the operations of `engine.bound` over the rates that `engine.probe` found, and the bytes
of KV over those of memory and disk. Nothing is added for what the probe doesn't see: looking
chunks up, the tokenizer, another process on the same cores.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise

from cache_store.keys import DType, KVSpec
from cache_store.store import ChunkStore
from engine import bound
from engine.bound import Flops
from engine.config import ModelConfig
from engine.policies import budget
from engine.precompute import BATCH_TOKENS
from engine.probe import Probe, Rate, layer_flops
from engine.trial import PromptShape, first_layers


@dataclass(frozen=True)
class Sizes:
    """Bytes of KV: of a token; of a chunk of so many tokens; of its entry, on disk, with header,
    index rows and rounding to blocks."""

    token: int
    chunk_tokens: int
    chunk: int
    entry: int


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token in one way, by what takes them. read_warm_s: KV in the page
    cache; read_cold_s: KV on the disk alone, None where that isn't known, and cold_cpu_s the part
    of it in which a core works. other_s: what prompts that were tried took besides."""

    compute_s: float
    place_s: float = 0.0
    read_warm_s: float = 0.0
    read_cold_s: float | None = 0.0
    cold_cpu_s: float = 0.0
    other_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.compute_s + self.place_s + self.read_warm_s + self.other_s

    @property
    def ttft_cold_s(self) -> float | None:
        """With KV from the disk, where layers are waited for while others are computed."""
        if self.read_cold_s is None:
            return None
        return max(self.ttft_s - self.read_warm_s + self.cold_cpu_s, self.read_cold_s)


@dataclass(frozen=True)
class Way:
    """A way to the first token. ratio: None for a full prefill. speedup: full prefill over it."""

    name: str
    ratio: float | None
    time: FirstToken
    speedup: float


@dataclass(frozen=True)
class Times:
    """What a machine will take: for chunks to be ingested, for a prompt over chunks in several
    ways, full prefill first, and for its answer. load_warm_s, load_cold_s: opening, reading and
    checking the prompt's KV, partly while it is computed; cold from the disk, if that is known."""

    ingest_s: float
    load_warm_s: float
    load_cold_s: float | None
    ways: tuple[Way, ...]
    decode_tokens_s: float


def shape_spec(config: ModelConfig, dtype: DType) -> KVSpec:
    """A model's KV as far as its size goes."""
    return KVSpec("0" * 64, "0" * 64, config.layers, config.kv_heads, config.head_dim, dtype)


def kv_sizes(spec: KVSpec, chunk_tokens: int, prefix: int) -> Sizes:
    """What chunks of so many tokens take behind a prefix."""
    return Sizes(
        spec.token_bytes,
        chunk_tokens,
        spec.layers * spec.layer_bytes(chunk_tokens),
        ChunkStore.predicted_bytes(spec, chunk_tokens, prefix),
    )


def stored_bytes(spec: KVSpec, chunks: Iterable[int], prefix: int) -> int:
    """Bytes on disk of chunks of these lengths and of the prefix they are computed behind."""
    entries = [ChunkStore.predicted_bytes(spec, tokens, prefix) for tokens in chunks]
    return sum(entries) + (ChunkStore.predicted_bytes(spec, prefix) if prefix and entries else 0)


@dataclass(frozen=True)
class Overhead:
    """Seconds that whole prompts took besides what is counted of them: for each prompt, for each
    layer of each cached token, and for selecting among them."""

    prompt_s: float = 0.0
    token_layer_s: float = 0.0
    select_s: float = 0.0


def overhead(config: ModelConfig, probe: Probe) -> Overhead:
    """What the probe's trials took beyond the operations and bytes in them."""
    over = {
        (trial.layers, trial.ratio): trial.seconds
        - _counted(first_layers(config, trial.layers), probe, probe.shape, trial.ratio).ttft_s
        for trial in probe.trials
    }
    reused = sorted((layers, seconds) for (layers, ratio), seconds in over.items() if not ratio)
    if not reused:
        return Overhead()
    (few, first), (most, second) = reused[0], reused[-1]
    layer = max(0.0, (second - first) / (most - few)) if most > few else 0.0
    blended = [over[key] for key in over if key[1]]
    return Overhead(
        max(0.0, first - few * layer),
        layer / probe.shape.cached,
        max(0.0, max(blended, default=0.0) - second),
    )


def full_prefill(config: ModelConfig, probe: Probe, shape: PromptShape) -> FirstToken:
    """The whole prompt computed."""
    flops = bound.full_prefill(config, shape.tokens)
    return FirstToken(
        _linear(config, probe, flops, shape.tokens)
        + flops.attention / probe.causal.flops
        + probe.head_s
    )


def blend(
    config: ModelConfig,
    probe: Probe,
    shape: PromptShape,
    *,
    ratio: Decimal,
    check_layer: int = 1,
    policy: str = "value",
) -> FirstToken:
    """A blend of chunks that are all stored, each computed alone behind the prefix; at ratio 0,
    reuse."""
    counted = _counted(config, probe, shape, ratio, check_layer, policy)
    over = overhead(config, probe)
    # Where the question reads all of the stored KV first, every layer is gone over twice.
    hits = shape.cached - shape.exact
    some = 0 < budget(ratio, hits, shape.cached) < hits
    reads = some and len(bound.policy_of(policy).question_layers(config.layers)) > 0
    layers = config.layers * (2 if reads else 1)
    other = over.prompt_s + over.token_layer_s * shape.cached * layers
    return replace(counted, other_s=other + (over.select_s if ratio else 0.0))


def _counted(
    config: ModelConfig,
    probe: Probe,
    shape: PromptShape,
    ratio: Decimal,
    check_layer: int = 1,
    policy: str = "value",
) -> FirstToken:
    """The operations and bytes of a blend, at the probe's rates."""
    c = config
    chooser = bound.policy_of(policy)
    flops = bound.predicted(
        c,
        prefix=shape.prefix,
        cached=shape.cached,
        exact=shape.exact,
        always=shape.always,
        ratio=ratio,
        check_layer=check_layer,
        policy=policy,
    )
    selected = budget(ratio, shape.cached - shape.exact, shape.cached)
    # The layers before the selection see every chunk token, and work at the rates of many tokens.
    before = check_layer if chooser.full_layers and selected else 0
    seen = range(shape.prefix + shape.exact, shape.tokens)
    width = 4 * c.heads * c.head_dim
    many = Flops(
        linear=before * layer_flops(c) * len(seen),
        attention=sum(width * bound.visible_keys(seen, w) for w in c.windows[:before]),
    )
    tail = range(shape.prefix + shape.cached, shape.tokens)
    some = 0 < selected < shape.cached - shape.exact  # of all or none, nobody is asked
    asked = bound.reading(c, chooser, tail) if some else Flops()
    few = Flops(
        flops.linear - many.linear - asked.linear,
        flops.attention - many.attention - asked.attention,
    )
    rows = selected + shape.always
    compute = (
        (many.linear + flops.scoring) / rate_at(probe.linear, len(seen))
        + many.attention / probe.causal.flops
        + _linear(c, probe, few, rows)
        + few.attention / rate_at(probe.scattered, rows)
        + asked.linear / rate_at(probe.linear, shape.always)
        + asked.attention / rate_at(probe.scattered, shape.always)
        + probe.plan_s
        + probe.head_s
    )
    nbytes = (shape.prefix + shape.cached) * shape_spec(c, probe.kv_dtype).token_bytes
    return FirstToken(
        compute,
        nbytes / probe.place_bytes_s,
        nbytes / probe.disk.warm if probe.disk.warm else 0.0,
        nbytes / probe.disk.cold if probe.disk.cold else None,
        nbytes / probe.disk.cold * probe.disk.cold_cpu if probe.disk.cold else 0.0,
    )


def times(
    config: ModelConfig,
    probe: Probe,
    shape: PromptShape,
    chunks: Sequence[int],
    *,
    ratios: Iterable[Decimal],
    check_layer: int = 1,
    policy: str = "value",
) -> Times:
    """Everything that can be timed: ingest of chunks of these lengths, a full prefill, a blend at
    each ratio above 0, reuse, and decoding."""
    full = full_prefill(config, probe, shape)
    ways = [Way("full prefill", None, full, 1.0)]
    for ratio in (*(ratio for ratio in dict.fromkeys(ratios) if ratio), Decimal(0)):
        name = f"blend {ratio}" if ratio else "reuse"
        time = blend(config, probe, shape, ratio=ratio, check_layer=check_layer, policy=policy)
        ways.append(Way(name, float(ratio), time, full.ttft_s / time.ttft_s))
    warm, cold = load_seconds(config, probe, shape)
    return Times(
        ingest_seconds(config, probe, chunks, shape.prefix),
        warm,
        cold,
        tuple(ways),
        decode_rate(config, probe, shape.tokens),
    )


def load_seconds(
    config: ModelConfig, probe: Probe, shape: PromptShape
) -> tuple[float, float | None]:
    """Opening, reading and checking a prompt's KV, as it took in the largest trial; from the page
    cache and from the disk."""
    read = _counted(config, probe, shape, Decimal(0))
    reused = [trial for trial in probe.trials if not trial.ratio]
    warm = read.read_warm_s
    if reused:
        tried = max(reused, key=lambda trial: trial.layers)
        part = (shape.prefix + shape.cached) / (probe.shape.prefix + probe.shape.cached)
        warm = max(warm, tried.load_s * part * config.layers / tried.layers)
    if read.read_cold_s is None:
        return warm, None
    return warm, warm - read.read_warm_s + read.read_cold_s


def ingest_seconds(config: ModelConfig, probe: Probe, chunks: Sequence[int], prefix: int) -> float:
    """Computing chunks of these lengths, each behind the prefix, while others are written."""
    total = sum(chunks)
    if not total:
        return 0.0
    together = min(total, BATCH_TOKENS)
    compute = 0.0
    for tokens, count in Counter(chunks).items():
        flops = bound.predicted(config, prefix=prefix, cached=0, always=tokens)
        each = _linear(config, probe, flops, together)
        compute += count * (each + flops.attention / probe.causal.flops)
    nbytes = shape_spec(config, probe.kv_dtype).token_bytes * total
    write = nbytes / probe.disk.write if probe.disk.write else 0.0
    batches = -(-total // BATCH_TOKENS)
    return max(compute, write) + min(compute, write) / batches


def decode_rate(config: ModelConfig, probe: Probe, tokens: int) -> float:
    """Tokens a second of an answer behind so many tokens."""
    flops = bound.predicted(config, prefix=tokens, cached=0, always=1)
    return 1 / (
        _linear(config, probe, flops, 1) + flops.attention / probe.scattered[0].flops + probe.head_s
    )


def rate_at(rates: Sequence[Rate], tokens: int) -> float:
    """Operations a second for so many tokens at once.

    Between two counts that were tried the time grows in a straight line; below the first it
    doesn't fall, and beyond the last the rate stays.
    """
    points = [(rate.tokens, rate.tokens / rate.flops) for rate in rates]
    if tokens <= points[0][0]:
        return tokens / points[0][1]
    for (n0, t0), (n1, t1) in pairwise(points):
        if tokens <= n1:
            return tokens / (t0 + max(0.0, t1 - t0) * (tokens - n0) / (n1 - n0))
    return rates[-1].flops


def _linear(config: ModelConfig, probe: Probe, flops: Flops, tokens: int) -> float:
    """Seconds of the layers' matrices, the LM head's left out, for tokens that go together."""
    head = 2 * config.hidden * config.vocab
    return (flops.linear - head) / rate_at(probe.linear, tokens)
