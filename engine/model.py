"""The decoder, as the steps that blending puts together: each works on any subset of tokens."""

import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from cache_store.errors import UsageError
from cache_store.keys import DType
from engine.attention import AttentionPlan
from engine.config import ModelConfig, load_config
from engine.kernels import kernels_for
from engine.kernels.protocol import Run
from engine.kv_cache import KVCache
from engine.ranks import ALONE, Ranks
from engine.rope import Rope, Tables
from engine.weights import Weights, load_weights

DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

_VIEWS = 512  # shapes of intermediate results that are kept ready


class Decoder:
    """A decoder-only transformer with its weights on one device.

    Hidden states are [T, hidden], one row a token, whichever positions those tokens have. Not
    thread-safe: intermediate results share memory. Call it under `torch.inference_mode`.
    ranks: who else has heads of this model; `config` counts this one's.
    """

    ranks: Ranks = ALONE

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.weights = weights
        self._set_up(config, weights.embed.device, weights.embed.dtype)

    def _set_up(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        """All but the weights."""
        self.config, self.device, self.dtype = config, device, dtype
        self.rope = Rope(config, self.device)
        self.kernels = kernels_for(self.device, self.dtype)
        # Rounded to the working type first, as the models' own code does.
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=self.dtype))
        self._spare: torch.Tensor | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # parts of them

    @classmethod
    def load(cls, model_dir: Path, device: str = "auto", dtype: str = "auto") -> "Decoder":
        """Maps a checkpoint directory. Raises NotFoundError, UsageError, IntegrityError."""
        config = load_config(model_dir)
        where = choose_device(device)
        kind = DTYPES[choose_dtype(dtype, config.dtype, where)]
        return cls(config, load_weights(model_dir, config, where, kind))

    def new_cache(self, capacity: int, *, passing: bool = False) -> KVCache:
        """A KV cache for so many tokens, in the memory of the last one that was dropped if that
        fits: fresh memory costs as much time again as writing the KV to it. passing: see
        `KVCache`; its memory is the model's own, which the next such cache overwrites."""
        size, spare = KVCache.size(self.config, capacity, passing=passing), self._spare
        if passing:
            return KVCache(self.config, capacity, self._kept("cache", (size,)), passing=True)
        if spare is not None and size <= len(spare) <= 2 * size:
            self._spare = None
        else:
            spare = torch.empty(size, dtype=self.dtype, device=self.device)
        cache = KVCache(self.config, capacity, spare)
        weakref.finalize(cache, self._take_back, spare).atexit = False
        return cache

    def _take_back(self, memory: torch.Tensor) -> None:
        if self._spare is None or len(self._spare) < len(memory):
            self._spare = memory

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden]."""
        x = F.embedding(token_ids, self.weights.embed)
        return x if self._embed_scale == 1 else x.mul_(self._embed_scale)

    def norm_in(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The input of a layer's attention projections; the next norm overwrites it."""
        weight = self.weights.layers[layer].input_norm
        return self.kernels.norm(x, weight, self.config.rms_norm_eps, self._kept("norm", x.shape))

    def keys_values(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K before RoPE (after any k-norm) and V, each [T, kv_heads, head_dim]."""
        w, c = self.weights.layers[layer], self.config
        fresh = normed.new_empty(2, normed.shape[0], c.kv_heads * c.head_dim)
        k = self.kernels.linear(normed, w.k, w.k_bias, fresh[0]).view(-1, c.kv_heads, c.head_dim)
        v = self.kernels.linear(normed, w.v, w.v_bias, fresh[1]).view(-1, c.kv_heads, c.head_dim)
        return (k if w.k_norm is None else self._head_norm(k, w.k_norm)), v

    def queries(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Q before RoPE (after any q-norm), [T, heads, head_dim]; the next call overwrites it."""
        w, c = self.weights.layers[layer], self.config
        q = self._linear("q", normed, w.q, w.q_bias).view(-1, c.heads, c.head_dim)
        return q if w.q_norm is None else self._head_norm(q, w.q_norm)

    def _head_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.norm(x, weight, self.config.rms_norm_eps, x)

    def rotated(self, layer: int, x: torch.Tensor, rows: Tables) -> torch.Tensor:
        """Q or K [T, heads, head_dim] at the positions whose cos and sin rows are given, in
        place."""
        turned = rows.layer(layer)
        return x if turned is None else self.kernels.place(x, turned, x)

    def store(
        self,
        layer: int,
        cache: KVCache,
        where: tuple[int, int] | torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Tables,
    ) -> None:
        """Puts K (before RoPE) and V [T, kv_heads, head_dim] into the cache, K rotated.

        where: positions [start, end), or int64 [T]; rows: cos and sin there.
        """
        turned = rows.layer(layer)
        places = where if isinstance(where, torch.Tensor) else None
        span = (0, cache.capacity) if isinstance(where, torch.Tensor) else where
        k_out, v_out = cache.rows(layer, *span)
        self.kernels.place(k, turned, k_out, places)
        self.kernels.place(v, None, v_out, places)

    def store_runs(self, layer: int, cache: KVCache, runs: Sequence[Run], tables: Tables) -> None:
        """Puts stored runs of K (before RoPE) and V into the cache, K rotated by its positions'
        rows of `Rope.tables`."""
        self.kernels.place_runs(runs, tables.layer(layer), cache.k[layer], cache.v[layer])

    def plan(self, positions: list[int]) -> AttentionPlan:
        """Attention of tokens at these increasing positions, for every layer."""
        return AttentionPlan(positions, self.device, self.dtype)

    def attend(
        self, layer: int, q: torch.Tensor, cache: KVCache, plan: AttentionPlan
    ) -> torch.Tensor:
        """Attention of the plan's rotated queries over the cache, [T, heads * head_dim]; the next
        call overwrites it."""
        k, v, window = cache.k[layer], cache.v[layer], self.config.windows[layer]
        out = self._kept("attention", q.shape)
        return self.kernels.attend(q, k, v, plan, window, out).view(q.shape[0], -1)

    def shift(
        self,
        layer: int,
        cache: KVCache,
        spans: torch.Tensor,
        shifts: torch.Tensor,
        tables: Tables,
    ) -> None:
        """Moves spans of the cache, int64 [2, S] on the host, by shifts [S, 2, kv_heads, head_dim]
        of K before RoPE and of V."""
        turned = tables.layer(layer)
        self.kernels.shift(cache.k[layer], cache.v[layer], spans, shifts, turned)

    def deviations(
        self,
        layer: int,
        cache: KVCache,
        fresh: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
        bounds: torch.Tensor,
        back: Tables,
    ) -> torch.Tensor:
        """Fresh K before RoPE and V [T, kv_heads, head_dim] less what the cache holds at `places`,
        int64 [T], its K turned by the rows of `back`: summed by group, float32
        [S, 2, kv_heads, head_dim]. bounds: of the groups, int64 [S + 1], on the host."""
        k, v = cache.k[layer], cache.v[layer]
        return self.kernels.deviations(k, v, *fresh, places, bounds, back.layer(layer))

    def value_norms(self, layer: int, cache: KVCache) -> torch.Tensor:
        """L2 norm of each position's V, float32 [kv_heads, capacity]."""
        return self.kernels.norms(cache.v[layer])

    def mass(
        self, layer: int, q: torch.Tensor, cache: KVCache, plan: AttentionPlan, counted: int
    ) -> torch.Tensor:
        """Attention each position gets from the plan's last `counted` rotated queries, summed over
        them, float32 [heads, capacity]."""
        window = self.config.windows[layer]
        return self.kernels.mass(q, cache.k[layer], plan, window, counted)

    def finish(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Adds a layer's output projection and MLP to the residual stream `x` [T, hidden], in
        place, and returns it."""
        w, eps = self.weights.layers[layer], self.config.rms_norm_eps
        projected = self._linear("o", attention, w.o, w.o_bias)
        if w.o_norm is not None:
            projected = self.kernels.norm(projected, w.o_norm, eps, projected)
        normed = self.kernels.add_norm(x, projected, w.post_norm, eps, self._kept("norm", x.shape))
        shape = (x.shape[0], self.config.intermediate)
        gate = self.kernels.gated(
            normed, w, self.config.activation, lambda slot: self._kept(slot, shape)
        )
        down = self._linear("o", gate, w.down, w.down_bias)
        return x.add_(
            down if w.down_norm is None else self.kernels.norm(down, w.down_norm, eps, down)
        )

    def _linear(
        self, slot: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weight.T + bias, into memory that the next call with this slot overwrites."""
        return self.kernels.linear(x, weight, bias, self._kept(slot, (x.shape[0], weight.shape[0])))

    def _kept(self, slot: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for an intermediate result, the slot's own.

        A fresh one costs a page fault for every 4 kB, on a CPU as much as half a product.
        """
        kept = self._views.get((slot, shape))
        if kept is not None:
            return kept
        size = math.prod(shape)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[slot] = torch.empty(size, dtype=self.dtype, device=self.device)
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}
        if len(self._views) >= _VIEWS:
            self._views.clear()
        kept = self._views[slot, shape] = buffer[:size].view(shape)
        return kept

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer [T, hidden] -> float32 logits [T, vocab]."""
        normed = self.kernels.norm(
            x, self.weights.norm, self.config.rms_norm_eps, self._kept("norm", x.shape)
        )
        out = x.new_empty(len(x), len(self.weights.head))
        return self.kernels.linear(normed, self.weights.head, None, out).float()


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda`, `cuda:N` or `mps`. Raises UsageError where it is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--device {name}: no such device", "use auto, cpu, cuda, cuda:N or mps"
        ) from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device {name}: not supported", "use auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count() if cuda else 0
        raise UsageError(f"--device {name}: {count} CUDA devices are usable here", "use cpu")
    if device.type == "mps" and not mps:
        raise UsageError(f"--device {name}: MPS is not usable here", "use cpu")
    return device


def choose_dtype(name: str, checkpoint: DType, device: torch.device) -> DType:
    """`auto` is the checkpoint's own type, or fp32 on a CPU that has no fast bf16."""
    if name != "auto":
        known = next((dtype for dtype in DTYPES if dtype == name), None)
        if known is None:
            raise UsageError(f"--dtype {name}: unknown", "use auto, bf16, fp16 or fp32")
        return known
    if device.type != "cpu" or checkpoint == "fp32":
        return checkpoint
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # AVX-512 or better
    return "bf16" if fast and checkpoint == "bf16" else "fp32"
