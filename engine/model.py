"""The decoder, as the steps that blending puts together: each works on any subset of tokens."""

from pathlib import Path

import torch
import torch.nn.functional as F

from cache_store.errors import UsageError
from cache_store.keys import DType
from engine.attention import AttentionPlan, attend
from engine.config import ModelConfig, load_config
from engine.kv_cache import KVCache
from engine.rope import Rope, rotate
from engine.weights import Weights, load_weights

DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class Decoder:
    """A decoder-only transformer with its weights on one device.

    Hidden states are [T, hidden], one row a token, whichever positions those tokens have. Not
    thread-safe: intermediate results share memory. Call it under `torch.inference_mode`.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self.rope = Rope(config, self.device)
        self._buffers: dict[str, torch.Tensor] = {}

    @classmethod
    def load(cls, model_dir: Path, device: str = "auto", dtype: str = "auto") -> "Decoder":
        """Maps a checkpoint directory. Raises NotFoundError, UsageError, IntegrityError."""
        config = load_config(model_dir)
        where = choose_device(device)
        kind = DTYPES[choose_dtype(dtype, config.dtype, where)]
        return cls(config, load_weights(model_dir, config, where, kind))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's activation, in place where torch can."""
        if self.config.activation == "silu":
            return F.silu(x, inplace=True)
        tanh = self.config.activation == "gelu_pytorch_tanh"
        return F.gelu(x, approximate="tanh" if tanh else "none")

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(self.config, capacity, self.device, self.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden]."""
        return F.embedding(token_ids, self.weights.embed)

    def norm_in(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The input of a layer's attention projections."""
        return self._rms(x, self.weights.layers[layer].input_norm)

    def keys_values(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K before RoPE (after any k-norm) and V, each [T, kv_heads, head_dim]."""
        w, c = self.weights.layers[layer], self.config
        k = F.linear(normed, w.k, w.k_bias).view(-1, c.kv_heads, c.head_dim)
        v = F.linear(normed, w.v, w.v_bias).view(-1, c.kv_heads, c.head_dim)
        return (k if w.k_norm is None else self._rms(k, w.k_norm)), v

    def queries(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Q before RoPE (after any q-norm), [T, heads, head_dim]."""
        w, c = self.weights.layers[layer], self.config
        q = self._linear("q", normed, w.q, w.q_bias).view(-1, c.heads, c.head_dim)
        return q if w.q_norm is None else self._rms(q, w.q_norm)

    def rotated(
        self,
        layer: int,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Q or K [T, heads, head_dim] at the positions whose cos and sin rows are given."""
        if self.config.rope_layers[layer]:
            return rotate(x, *tables, out=out)
        return x if out is None else out.copy_(x)

    def plan(self, positions: list[int]) -> AttentionPlan:
        """Attention of tokens at these increasing positions, for every layer."""
        return AttentionPlan(positions, self.device, self.dtype)

    def attend(
        self, layer: int, q: torch.Tensor, cache: KVCache, plan: AttentionPlan
    ) -> torch.Tensor:
        """Attention of the plan's rotated queries over the cache, [T, heads * head_dim]."""
        return attend(q, cache.k[layer], cache.v[layer], plan, self.config.windows[layer])

    def finish(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Adds a layer's output projection and MLP to the residual stream `x` [T, hidden], in
        place, and returns it."""
        w = self.weights.layers[layer]
        x.add_(self._linear("o", attention, w.o, w.o_bias))
        normed = self._rms(x, w.post_norm)
        gate = self._activate(self._linear("gate", normed, w.gate, w.gate_bias))
        gate.mul_(self._linear("up", normed, w.up, w.up_bias))
        return x.add_(self._linear("o", gate, w.down, w.down_bias))

    def _linear(
        self, slot: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weight.T + bias, into memory that the next call with this slot overwrites.

        A fresh result costs a page fault for every 4 kB, on a CPU half the time of the product.
        """
        size = len(x) * len(weight)
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[slot] = x.new_empty(size)
        out = buffer[:size].view(len(x), len(weight))
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last layer [T, hidden] -> float32 logits [T, vocab]."""
        return F.linear(self._rms(x, self.weights.norm), self.weights.head).float()

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32, rounded once; torch's own is several times
        slower on a CPU."""
        y = x.to(torch.float32, copy=True)
        size = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(self.config.rms_norm_eps).rsqrt_()
        return y.mul_(scale).mul_(weight.float()).to(x.dtype)


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
