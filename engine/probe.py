"""How fast this machine does what a prefill consists of, found out in two or three seconds.

Nothing is taken from a table: the decoder's own steps run on random weights of the model's shapes,
and a temporary file is written and read where the store lies. No checkpoint is needed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cache_store.errors import CacheblendError
from cache_store.keys import ITEM_BYTES, DType
from engine.bound import full_prefill, spread, visible_keys
from engine.config import ModelConfig
from engine.diskprobe import DiskRates, probe_disk
from engine.machine import this_machine
from engine.model import DTYPES, Decoder
from engine.threads import set_threads
from engine.timing import synchronize
from engine.trial import PromptShape, Trial, first_layers, run_trials
from engine.weights import LayerWeights, Weights

STANDARD = PromptShape(prefix=32, chunks=8, chunk_tokens=249, separator=0, suffix=24)
ROWS = (1, 24, 128, 512, 1024)  # tokens that go through a layer together
QUERIES = (1, 24)  # of attention over a prompt, and these shares of its tokens:
SHARES = (0.05, 0.16, 0.3)
WEIGHT_BYTES = 256 * 2**20  # of random weights: more than most caches hold, as a model's are
FEWEST = 3  # runs of a measurement
ENOUGH = 0.04  # seconds it repeats itself for
SLOW = 0.15  # seconds a run takes, after which once more is enough
LONGEST = 0.3  # seconds one run is expected to take at most, else less is tried


@dataclass(frozen=True)
class Rate:
    """Operations a second where so many tokens are computed at once."""

    tokens: int
    flops: float


@dataclass(frozen=True)
class Probe:
    """A machine's rates for one model's shapes. Operations count as in `engine.bound`.

    linear: a layer without its attention; the time of norms, rotation and the like is in it.
    scattered: attention of some of `tokens` tokens over them all; causal: of all of them. Both
    tables begin with the fewest. plan_s: preparing scattered attention, once a selection. head_s:
    the LM head for one token. place_bytes_s: stored K rotated to its place and V copied, into a
    new KV cache. weight_bytes_s: weights read where one token is computed. trials: whole prompts
    of `shape` through some layers. notes: what could not be measured. seconds: what the probe took.
    """

    device: str
    dtype: DType
    kv_dtype: DType
    threads: int
    tokens: int
    linear: tuple[Rate, ...]
    scattered: tuple[Rate, ...]
    causal: Rate
    plan_s: float
    head_s: float
    place_bytes_s: float
    weight_bytes_s: float
    disk: DiskRates
    shape: PromptShape
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values: operations, bytes and seconds."""
        return asdict(self) | {"trials": [t.to_json() for t in self.trials]}


def probe(
    config: ModelConfig,
    device: torch.device,
    dtype: DType,
    folder: Path,
    *,
    kv_dtype: DType | None = None,
    shape: PromptShape = STANDARD,
    threads: int | None = None,
) -> Probe:
    """Measures what `config` takes on a device, and the disk under `folder`, which is not made.

    kv_dtype: what KV is stored in; None: `dtype`. shape: of the prompts it is asked for; shorter
    ones are tried where that takes too long.
    Raises CacheblendError where not even two layers of the model fit into memory.
    """
    began = time.perf_counter()
    stored = kv_dtype or dtype
    set_threads(threads)
    disk = probe_disk(folder)
    notes = [disk.note] if disk.note else []
    with torch.inference_mode():
        bench = _Bench(config, device, dtype)
        linear = bench.linear()
        length = bench.affordable(min(shape.tokens, config.context - 1))
        scattered, causal = bench.attention(length)
        shape = shape.within(length)
        try:
            trials = run_trials(bench.model, stored, shape, bench.seconds, blend=bench.quick(shape))
        except (CacheblendError, OSError) as error:
            trials = ()
            notes.append(f"no prompt could be tried: {error}")
        return Probe(
            device=str(device),
            dtype=dtype,
            kv_dtype=stored,
            threads=torch.get_num_threads(),
            tokens=length,
            linear=linear,
            scattered=scattered,
            causal=causal,
            plan_s=bench.plan_seconds(length),
            head_s=bench.head_seconds(),
            place_bytes_s=bench.placing(length),
            weight_bytes_s=linear[0].flops / 2 * ITEM_BYTES[dtype],  # two operations a weight
            disk=disk,
            shape=shape,
            trials=trials,
            notes=tuple(notes),
            seconds=time.perf_counter() - began,
        )


def layer_flops(config: ModelConfig) -> int:
    """Operations of a layer's matrices for one token."""
    head = 2 * config.hidden * config.vocab
    return (full_prefill(config, 1).linear - head) // config.layers


class _Bench:
    """A decoder of as many random layers as it takes to measure with."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: DType) -> None:
        self.config, self.device, self.dtype = config, device, DTYPES[dtype]
        layer_bytes = layer_flops(config) // 2 * ITEM_BYTES[dtype]
        free = this_machine().available
        if device.type == "cpu" and free is not None and 3 * layer_bytes > free:
            raise CacheblendError(
                f"a layer of this model has {layer_bytes} bytes of weights, {free} bytes of memory "
                "are free",
                "probe on a machine with more memory, or do without (--no-probe)",
            )
        self._token_seconds = 0.0  # of a layer, as far as is known
        self._noise = torch.randn(2**20).mul_(0.02).to(device, self.dtype)
        count = min(config.layers, max(2, WEIGHT_BYTES // layer_bytes))
        layers = tuple(self._layer() for _ in range(count))
        head = self._random(config.vocab, config.hidden)
        self.model = Decoder(
            first_layers(config, count), Weights(head, layers, self._norm(config.hidden), head)
        )

    def _random(self, *shape: int) -> torch.Tensor:
        """Numbers of a model's size; the same ones again and again, for drawing takes its time."""
        size = math.prod(shape)
        return self._noise.repeat(-(-size // len(self._noise)))[:size].view(shape)

    def _norm(self, size: int) -> torch.Tensor:
        """A norm's weight, of the type it has in a model."""
        weight = self._random(size)
        return weight.float() if self.config.centred_norms else weight

    def _layer(self) -> LayerWeights:
        c = self.config
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def some(size: int, present: bool) -> torch.Tensor | None:
            return self._random(size) if present else None

        return LayerWeights(
            input_norm=self._norm(c.hidden),
            q=self._random(q_rows, c.hidden),
            k=self._random(kv_rows, c.hidden),
            v=self._random(kv_rows, c.hidden),
            q_bias=some(q_rows, c.qkv_bias),
            k_bias=some(kv_rows, c.qkv_bias),
            v_bias=some(kv_rows, c.qkv_bias),
            q_norm=self._norm(c.head_dim) if c.qk_norm else None,
            k_norm=self._norm(c.head_dim) if c.qk_norm else None,
            o=self._random(c.hidden, q_rows),
            o_bias=some(c.hidden, c.o_bias),
            post_norm=self._norm(c.hidden),
            gate=self._random(c.intermediate, c.hidden),
            up=self._random(c.intermediate, c.hidden),
            down=self._random(c.hidden, c.intermediate),
            gate_bias=some(c.intermediate, c.mlp_bias),
            up_bias=some(c.intermediate, c.mlp_bias),
            down_bias=some(c.hidden, c.mlp_bias),
            o_norm=self._norm(c.hidden) if c.four_norms else None,
            down_norm=self._norm(c.hidden) if c.four_norms else None,
        )

    def linear(self) -> tuple[Rate, ...]:
        """All of a layer but its attention, for rising numbers of tokens."""
        rates: list[Rate] = []
        per_token, expected = layer_flops(self.config), 0.0
        for tokens, more in zip(ROWS, (*ROWS[1:], ROWS[-1]), strict=True):
            if tokens >= self.config.context or expected > LONGEST:
                break
            seconds = self._layer_seconds(tokens)
            self._token_seconds = seconds / tokens
            # One token reads all the weights: some more take hardly longer.
            expected = seconds * (more / tokens if tokens > 1 else 1)
            rates.append(Rate(tokens, tokens * per_token / seconds))
        return tuple(rates)

    def _layer_seconds(self, tokens: int) -> float:
        model, c = self.model, self.config
        x, attention = self._random(tokens, c.hidden), self._random(tokens, c.heads * c.head_dim)
        rows = model.rope.tables(tokens)[:tokens]
        cache = model.new_cache(tokens)

        def through(layers: int) -> None:
            for layer in range(layers):
                normed = model.norm_in(layer, x)
                k, v = model.keys_values(layer, normed)
                model.store(layer, cache, (0, tokens), k, v, rows)
                model.rotated(layer, model.queries(layer, normed), rows)
                model.finish(layer, x, attention)

        through(1)
        once = self._timed(lambda: through(1))
        layers = min(model.config.layers, int(ENOUGH / once))
        return self.seconds(lambda: through(layers)) / layers if layers > 1 else once

    def head_seconds(self) -> float:
        """Logits of one token."""
        x = self._random(1, self.config.hidden)
        return self.seconds(lambda: self.model.logits(x))

    def quick(self, shape: PromptShape) -> bool:
        """Whether a blend's first layer, which sees the whole prompt, doesn't take too long."""
        return shape.tokens * self._token_seconds < LONGEST

    def affordable(self, tokens: int) -> int:
        """As many tokens as causal attention over them can be tried with."""
        tried = min(256, tokens)
        seconds = self._attention_seconds(list(range(tried)), tried)
        return max(tried, min(tokens, int(tried * math.sqrt(LONGEST / seconds))))

    def attention(self, length: int) -> tuple[tuple[Rate, ...], Rate]:
        """Scattered queries, the last of them a question's, and plain causal attention."""
        counts = sorted({*QUERIES, *(math.ceil(share * length) for share in SHARES)})
        scattered = tuple(
            self._attention_rate(self._scattered(count, length), length)
            for count in counts
            if count < length
        )
        return scattered, self._attention_rate(list(range(length)), length)

    def plan_seconds(self, length: int) -> float:
        """What a plan costs besides the attention it is for."""
        positions = self._scattered(math.ceil(SHARES[1] * length), length)
        return max(
            0.0,
            self._attention_seconds(positions, length, anew=True)
            - self._attention_seconds(positions, length),
        )

    def _scattered(self, count: int, length: int) -> list[int]:
        """A question's positions at the end, the others spread over what is before it."""
        tail = min(count, QUERIES[-1], length)
        return spread(range(length - tail), count - tail) + list(range(length - tail, length))

    def _attention_rate(self, positions: list[int], length: int) -> Rate:
        c = self.config
        flops = 4 * c.heads * c.head_dim * visible_keys(positions, c.windows[0])
        return Rate(len(positions), flops / self._attention_seconds(positions, length))

    def _attention_seconds(self, positions: list[int], length: int, *, anew: bool = False) -> float:
        """A layer's attention. anew: with its plan."""
        model, c = self.model, self.config
        q = self._random(len(positions), c.heads, c.head_dim)
        cache = model.new_cache(length)
        for stored in (cache.k[0], cache.v[0]):
            stored.copy_(self._random(*stored.shape))
        plan = model.plan(positions)
        if anew:
            return self.seconds(lambda: model.attend(0, q, cache, model.plan(positions)))
        return self.seconds(lambda: model.attend(0, q, cache, plan))

    def placing(self, length: int) -> float:
        """Bytes of K and V a second, brought to the device and put in place."""
        model, c = self.model, self.config
        rows = model.rope.tables(length)[:length]
        k = self._random(length, c.kv_heads, c.head_dim).cpu()
        v = k.clone()

        def place() -> None:
            cache = model.new_cache(length)  # a new one, as for each prompt
            for layer in range(model.config.layers):
                moved = (k.to(self.device), v.to(self.device))
                model.store(layer, cache, (0, length), *moved, rows)

        return model.config.layers * 2 * k.nbytes / self.seconds(place)

    def seconds(self, work: Callable[[], object]) -> float:
        """The best of some runs after a first one that doesn't count: what else the machine does
        only adds to them."""
        times: list[float] = []
        first = spent = self._timed(work)
        if first > SLOW:
            return min(first, self._timed(work))
        began = time.perf_counter()
        while len(times) < FEWEST or spent < ENOUGH:
            times.append(self._timed(work))
            spent = time.perf_counter() - began
        return min(times)

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - began
