"""A prompt through a few layers of random weights, from a temporary store: what the way itself
takes, besides the operations and bytes that can be counted."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path

import torch

from cache_store.keys import DType, KVSpec
from cache_store.place import MIN_LIMIT
from cache_store.store import ChunkStore
from engine.codec import Codec
from engine.config import ModelConfig
from engine.model import Decoder
from engine.options import BlendOptions
from engine.prefill import Prefiller
from engine.prompt import Prompt, PromptChunk, lay_out

LAYERS = (4, 12)  # where the model has so many; else all it has, and one
KV_BYTES = 64 * 2**20  # of a temporary store's entries, at most about
BLEND = "0.16"


@dataclass(frozen=True)
class PromptShape:
    """Tokens of a prompt: its prefix, equal chunks with a separator between each two, a suffix."""

    prefix: int
    chunks: int
    chunk_tokens: int
    separator: int
    suffix: int

    @property
    def cached(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def exact(self) -> int:
        """The first chunk stands where it was computed, right behind the prefix."""
        return self.chunk_tokens if self.chunks else 0

    @property
    def always(self) -> int:
        """Tokens computed in any case."""
        return self.separator * max(0, self.chunks - 1) + self.suffix

    @property
    def tokens(self) -> int:
        return self.prefix + self.cached + self.always

    def within(self, tokens: int) -> "PromptShape":
        """The same with shorter chunks, so that it has no more than so many tokens."""
        room = (tokens - self.prefix - self.always) // max(1, self.chunks)
        return replace(self, chunk_tokens=max(1, min(self.chunk_tokens, room)))


@dataclass(frozen=True)
class Trial:
    """Seconds to the first token of a prompt through so many layers, at a ratio. load_s: those that
    its KV was opened, read and checked in, partly while layers were computed."""

    layers: int
    ratio: Decimal
    seconds: float
    load_s: float

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self) | {"ratio": float(self.ratio)}


def run_trials(
    model: Decoder,
    dtype: DType,
    shape: PromptShape,
    seconds: Callable[[Callable[[], object]], float],
    *,
    blend: bool,
) -> tuple[Trial, ...]:
    """Reuse through a few layers and through more, and with `blend` a blend through these.

    dtype: what KV is stored in. seconds: measures a run. Raises OSError and CacheblendError where
    no store can be made in the system's folder for temporary files.
    """
    c = model.config
    layer_bytes = _spec(model, dtype, 1).layer_bytes(shape.tokens)
    most = max(1, min(c.layers, LAYERS[1], KV_BYTES // layer_bytes))
    fewer = min(LAYERS[0], most // 2)
    trials = []
    for layers in (fewer, most) if fewer else (most,):
        spec = _spec(model, dtype, layers)
        limit = 2 * layers * layer_bytes + MIN_LIMIT + 2**26
        with (
            tempfile.TemporaryDirectory(prefix="cacheblend-probe-") as folder,
            ChunkStore.open(Path(folder) / "store", limit_bytes=limit) as store,
        ):
            run = Prefiller(_cut(model, layers), store, spec)
            prompt = _stored_prompt(run.model, store, spec, shape)
            for ratio in ("0", BLEND) if blend and layers == most > 1 else ("0",):
                mode = "blend" if ratio == BLEND else "reuse"
                options = BlendOptions.of(mode=mode, ratio=ratio, policy="value", min_tokens=0)
                loads: list[float] = []

                def prefill() -> None:
                    done = run(prompt, options)  # noqa: B023
                    done.logits.argmax().item()
                    loads.append(done.watch.load.seconds)  # noqa: B023

                taken = seconds(prefill)
                trials.append(Trial(layers, Decimal(ratio), taken, min(loads)))
    return tuple(trials)


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """A model of the first layers of another one."""
    return replace(
        config,
        layers=count,
        windows=config.windows[:count],
        rope_layers=config.rope_layers[:count],
    )


def _cut(model: Decoder, layers: int) -> Decoder:
    weights = replace(model.weights, layers=model.weights.layers[:layers])
    return Decoder(first_layers(model.config, layers), weights)


def _spec(model: Decoder, dtype: DType, layers: int) -> KVSpec:
    c = model.config
    return KVSpec("0" * 64, "0" * 64, layers, c.kv_heads, c.head_dim, dtype)


def _stored_prompt(model: Decoder, store: ChunkStore, spec: KVSpec, shape: PromptShape) -> Prompt:
    """A prompt whose prefix and chunks are in the store, their KV being noise."""
    ids = iter(range(shape.tokens))  # all different, so that no two chunks are the same

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(ids) % model.config.vocab for _ in range(count))

    prefix, separator, suffix = take(shape.prefix), take(shape.separator), take(shape.suffix)
    chunks = [PromptChunk(take(shape.chunk_tokens)) for _ in range(shape.chunks)]
    wanted: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(prefix, ())] if prefix else []
    wanted += [(chunk.token_ids, prefix) for chunk in chunks]
    codec = Codec.of(spec, model.dtype)
    for token_ids, context in wanted:
        noise = torch.randn(len(token_ids), spec.kv_heads, spec.head_dim)
        layer = codec.encode(*(noise.mul_(0.02).to(model.dtype),) * 2)
        regime = model.rope.regime(len(context) + len(token_ids))
        store.put(spec, token_ids, context, regime, [layer] * spec.layers)
    return lay_out(prefix, chunks, separator, suffix)
