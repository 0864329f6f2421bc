"""Attention by the fused kernels torch has for CUDA, chosen by what is installed and works.

Consecutive positions, so every decoding step too: FlashAttention. Scattered positions and sliding
windows: FlexAttention where there is much to do, else the memory-efficient kernel, a block of
queries at a time, with masks. The first two are tried on an example, on the device and against
float32, and done without where they fail.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import count
from random import Random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention import BLOCK, AttentionPlan, attend
from engine.kernels.flex import TILE, block_mask, flex_attention
from engine.kernels.plain import PlainKernels

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Q [1, heads, T, head_dim], K and V [1, kv_heads, N, head_dim]
Flash = Callable[[Tensor, Tensor, Tensor], Tensor]
Flex = Callable[[Tensor, Tensor, Tensor, "BlockMask"], Tensor]

# Scores a head from which on FlexAttention is used: below, what it saves in a prompt is far less
# than the seconds it takes to compile, once a process. An estimate, not measured.
MANY = 2**23
_CLOSE = 0.01  # relative distance from float32; rounding makes 0.004, one key too many 0.05
_FAILURES = (RuntimeError, OSError, ImportError, ValueError, TypeError, AttributeError)
# Not cuDNN's, which makes a plan for every new shape, in half a second: all of ours are new.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cuda_kernels(device: torch.device, dtype: torch.dtype) -> "CudaKernels":
    """What works on this device for tensors of this type. FlexAttention is tried when needed."""
    q = torch.zeros(1, 4, BLOCK, 64, device=device, dtype=dtype)
    faults: list[tuple[str, str | None]] = []
    if can_use_flash_attention(SDPAParams(q, q[:, :2], q[:, :2], None, 0.0, False, True)):
        run = CudaKernels(flash_attention, None)._run
        faults.append(("FlashAttention", _fault(run, (4, 2, 64), range(40, 90), None, q)))
    else:
        faults.append(("FlashAttention", f"not there for {dtype} on this device"))
    if dtype == torch.float32:
        faults.append(("FlexAttention", "float32 is computed with all its bits"))
    elif find_spec("triton") is None:
        faults.append(("FlexAttention", "triton is not installed"))
    elif torch.cuda.get_device_capability(device) < (8, 0):
        faults.append(("FlexAttention", "the device is older than compute capability 8.0"))
    else:
        faults.append(("FlexAttention", None))
    flash, flex = (fault is None for _, fault in faults)
    notes = tuple(f"{name} is not used: {fault}" for name, fault in faults if fault is not None)
    return CudaKernels(flash_attention if flash else None, flex_attention if flex else None, notes)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: the last query sees all keys, the one before all but the last, and so on.

    As `torch.nn.attention.bias.causal_lower_right`, without the second its import takes.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


class CudaKernels(PlainKernels):
    """See `engine.kernels.protocol`. flash, flex: None to do without."""

    name = "cuda"

    def __init__(self, flash: Flash | None, flex: Flex | None, notes: tuple[str, ...] = ()) -> None:
        self._flash, self._flex, self.notes = flash, flex, notes
        self._tried: set[tuple[int, int, int]] = set()

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        if weight.dtype != x.dtype:  # torch's kernel takes one type
            return super().norm(x, weight, eps, out)
        return F.rms_norm(x, list(weight.shape), weight, eps)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None, out: Tensor
    ) -> Tensor:
        if window is not None and plan.bounds[-1] < window:
            window = None  # nothing is out of reach yet
        if plan.consecutive and (window is None or len(plan) == 1) and self._has_run(q, plan):
            return self._run(q, k, v, plan, window, out)
        if self._flex is not None and _is_much(plan, window) and self._flex_works(q, k):
            try:
                return self._scattered(q, k, v, plan, window, out)
            except torch.OutOfMemoryError:  # no fault of the kernel's
                raise
            except _FAILURES as error:  # it may be compiled again, for other strides
                self._give_up(_said(error))
        return self._blocks(q, k, v, plan, window, out)

    def _has_run(self, q: Tensor, plan: AttentionPlan) -> bool:
        """Whether there is a kernel without a mask for these consecutive queries."""
        if self._flash is None:
            return plan.bounds[0] == 0
        return q.shape[2] % 8 == 0 and q.shape[2] <= 256

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None, out: Tensor
    ) -> Tensor:
        """Consecutive queries; a window for a single one only. The keys end with the last query's
        own, so that causal attention aligned to the bottom right is right."""
        end = plan.bounds[-1] + 1
        first = 0 if window is None else max(0, end - window)
        keys, values = k[:, first:end], v[:, first:end]
        if self._flash is not None:
            part = self._flash(q.transpose(0, 1)[None], keys[None], values[None])
            return out.copy_(part[0].transpose(0, 1))
        with sdpa_kernel(_SDPA):
            part = F.scaled_dot_product_attention(*_grouped(q, keys, values), is_causal=True)
        _by_group(out, len(k)).copy_(part)
        return out

    def _scattered(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None, out: Tensor
    ) -> Tensor:
        if self._flex is None:
            raise ValueError("there is no FlexAttention here")
        if ("flex", window) not in plan.memo:
            plan.memo["flex", window] = block_mask(plan, window)
        end, mask = plan.bounds[-1] + 1, plan.memo["flex", window]
        part = self._flex(q.transpose(0, 1)[None], k[None, :, :end], v[None, :, :end], mask)
        return out.copy_(part[0].transpose(0, 1))

    def _blocks(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, window: int | None, out: Tensor
    ) -> Tensor:
        rows, keys, values = _grouped(q, k, v)
        result = _by_group(out, len(k))
        with sdpa_kernel(_SDPA):
            for block in plan.blocks(window):
                result[:, :, block.start : block.end] = F.scaled_dot_product_attention(
                    rows[:, :, block.start : block.end],
                    keys[:, :, block.first : block.last],
                    values[:, :, block.first : block.last],
                    attn_mask=block.mask,
                )
        return out

    def _flex_works(self, q: Tensor, k: Tensor) -> bool:
        """Tries FlexAttention for these numbers and sizes of heads, which it is compiled for."""
        shape = (q.shape[1], k.shape[0], k.shape[2])
        if shape not in self._tried:
            self._tried.add(shape)
            # No two numbers alike: what is equal now would be compiled to be so always.
            free = (n for n in count(3) if n not in shape)
            queries, keys = next(free) * TILE - 28, next(free) * TILE - 31
            positions = [*sorted(Random(0).sample(range(keys - 1), queries - 1)), keys - 1]
            for window in (None, 100):
                fault = _fault(self._scattered, shape, positions, window, q)
                if fault is not None:
                    self._give_up(fault)
                    break
        return self._flex is not None

    def _give_up(self, fault: str) -> None:
        self._flex = None
        self.notes += (f"FlexAttention is not used: {fault}",)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q [T, heads, dim], K and V [kv_heads, N, dim] as [kv_heads, heads of each, T or N, dim].

    K and V repeat with a stride of 0, not copied, so that any kernel takes them: with `enable_gqa`
    and a mask torch computes all scores in memory.
    """
    rows = _by_group(q, len(k))
    shape = (-1, rows.shape[1], -1, -1)
    return rows, k[:, None].expand(shape), v[:, None].expand(shape)


def _by_group(x: Tensor, kv_heads: int) -> Tensor:
    """[T, heads, dim] -> a view [kv_heads, heads of each, T, dim]."""
    return x.view(len(x), kv_heads, -1, x.shape[2]).permute(1, 2, 0, 3)


def _is_much(plan: AttentionPlan, window: int | None) -> bool:
    keys = plan.bounds[-1] + 1
    return len(plan) > BLOCK and len(plan) * min(window or keys, keys) >= MANY


def _fault(
    way: Callable[..., Tensor],
    shape: tuple[int, int, int],
    positions: Sequence[int],
    window: int | None,
    like: Tensor,
) -> str | None:
    """What is wrong with a way to compute attention, as an example shows; None if nothing.

    shape: heads, kv_heads, head_dim. like: gives type and device.
    """
    (heads, kv_heads, dim), end = shape, positions[-1] + 1
    generator = torch.Generator(like.device).manual_seed(0)
    rows = end + 60  # the last of them garbage
    with torch.inference_mode(False):  # as a KV cache is: compiled code tells views apart
        memory = like.new_full((2 * kv_heads * rows * dim + 8,), torch.nan)
        cache = memory[:-8].view(2, kv_heads, rows, dim)
        cache[:, :, :end].normal_(generator=generator)
    with torch.inference_mode():
        q = like.new_empty((len(positions), heads, dim)).normal_(generator=generator)
        (k, v), wide = cache, q.float()
        plan = AttentionPlan(list(positions), q.device, q.dtype)
        reference = AttentionPlan(plan.bounds, q.device, torch.float32)
        exact = attend(wide, k.float(), v.float(), reference, window, torch.empty_like(wide))
        try:
            found = way(q, k, v, plan, window, torch.empty_like(q)).float()
        except _FAILURES as error:
            return _said(error)
        off = float((found - exact).norm() / exact.norm())
    return None if off < _CLOSE else f"an example comes out {off:.2g} off"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
