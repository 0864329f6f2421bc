"""Exact causal attention by absolute position, for any increasing set of query positions."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

# Queries that share one call: large enough to amortise the call, small enough that keys past a
# block's first position (masked, so wasted) stay few. Measured on 2 AVX-512/AMX cores.
BLOCK = 256
KEPT_MASK_BYTES = 256 * 2**20
_SCORES = 2**22  # of one KV head that `mass` has in memory at once


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a plan, which see keys [first, last) of the cache but what `mask`
    forbids: additive [end - start, last - first], or None where all of them see all."""

    start: int
    end: int
    first: int
    last: int
    mask: torch.Tensor | None


class AttentionPlan:
    """Which keys each query may see, worked out once and used at every layer.

    positions: strictly increasing, on the host; there: the same on the device, where it has them
    already. A query at p sees keys max(0, p - window + 1)..p, all of them and no later one,
    whatever else is in the cache. memo: what kernels derive from the plan and want to keep.
    """

    def __init__(
        self,
        positions: list[int],
        device: torch.device,
        dtype: torch.dtype,
        there: torch.Tensor | None = None,
    ) -> None:
        self.bounds = positions
        if there is None:
            there = torch.tensor(positions, dtype=torch.int64, device=device)
        self.positions = there
        self.memo: dict[Hashable, Any] = {}
        self._dtype = dtype
        self._blocks: dict[int | None, list[Block]] = {}
        ends = self.bounds[BLOCK - 1 :: BLOCK] + self.bounds[-1:]
        mask_bytes = sum(BLOCK * (end + 1) * dtype.itemsize for end in ends)
        self._keeps = mask_bytes <= KEPT_MASK_BYTES

    def __len__(self) -> int:
        return len(self.bounds)

    def last(self, count: int) -> "AttentionPlan":
        """The plan of the last `count` queries alone. The host waits for no device."""
        there = self.positions[-count:]
        return AttentionPlan(self.bounds[-count:], there.device, self._dtype, there)

    @property
    def consecutive(self) -> bool:
        """Whether no position between the first and the last is left out."""
        return self.bounds[-1] - self.bounds[0] == len(self) - 1

    @property
    def is_run(self) -> bool:
        """Whether these are consecutive positions, more of them than there are before."""
        return self.consecutive and len(self) > max(self.bounds[0], BLOCK)

    def blocks(self, window: int | None) -> Iterable[Block]:
        """The blocks of queries under a sliding window (None: attend to everything before).

        Kept for the next layer, unless their masks would take too much memory.
        """
        if window in self._blocks:
            return self._blocks[window]
        made = (
            self._block(start, min(start + BLOCK, len(self)), window)
            for start in range(0, len(self), BLOCK)
        )
        if not self._keeps:
            return made
        self._blocks[window] = list(made)
        return self._blocks[window]

    def _block(self, start: int, end: int, window: int | None) -> Block:
        first = 0 if window is None else max(0, self.bounds[start] - window + 1)
        last = self.bounds[end - 1] + 1
        if end - start == 1:  # its keys end at its own position and begin in its window
            return Block(start, end, first, last, None)
        # By position, never by the queries' place in the block: aligned to the bottom right,
        # scattered queries would see the future.
        keys = torch.arange(first, last, device=self.positions.device)
        queries = self.positions[start:end, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, device=keys.device, dtype=self._dtype)
        return Block(start, end, first, last, mask.masked_fill_(hidden, -torch.inf))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    window: int | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of the plan's queries over one layer's KV cache, by torch's own kernels.

    q: [T, heads, head_dim], rotated; k, v: [kv_heads, N, head_dim], k rotated, row i at position
    i. The result goes into out [T, heads, head_dim].
    """
    if window is not None and plan.bounds[-1] < window:
        window = None  # nothing is out of reach yet
    queries = q.transpose(0, 1)[None]  # [1, heads, T, head_dim]
    if window is None and plan.is_run:
        # Plain causal attention needs no mask. What stands before the run gets queries that count
        # for nothing: first²/2 scores more, which is less than masks cost.
        first, end = plan.bounds[0], plan.bounds[-1] + 1
        queries = F.pad(queries, (0, 0, first, 0)) if first else queries
        part = F.scaled_dot_product_attention(
            queries, k[None, :, :end], v[None, :, :end], is_causal=True, enable_gqa=True
        )
        return out.copy_(part[0, :, first:].transpose(0, 1))
    for block in plan.blocks(window):
        part = F.scaled_dot_product_attention(
            queries[:, :, block.start : block.end],
            k[None, :, block.first : block.last],
            v[None, :, block.first : block.last],
            attn_mask=block.mask,
            enable_gqa=True,
        )
        out[block.start : block.end] = part[0].transpose(0, 1)
    return out


def mass(
    q: torch.Tensor, k: torch.Tensor, plan: AttentionPlan, window: int | None, counted: int
) -> torch.Tensor:
    """How much attention each key gets from the plan's last `counted` queries, in float32.

    q: [T, heads, head_dim], rotated; k: [kv_heads, N, head_dim], rotated, row i at position i.
    Returns [heads, N], 0 for keys that none of these queries sees. A KV head and a block of queries
    at a time. Raises ValueError.
    """
    check_mass(q, k, plan, counted)
    (_, heads, dim), (kv_heads, capacity, _) = q.shape, k.shape
    out = torch.zeros(heads, capacity, dtype=torch.float32, device=q.device)
    by_head = out.view(kv_heads, -1, capacity)
    if not counted:
        return out
    bounds, positions = plan.bounds[-counted:], plan.positions[-counted:]
    shared = heads // kv_heads
    queries = q[-counted:].reshape(counted, kv_heads, shared, dim).permute(1, 2, 0, 3)
    step = max(1, _SCORES // (shared * (bounds[-1] + 1)))
    for start in range(0, counted, step):
        here = slice(start, min(start + step, counted))
        first = 0 if window is None else max(0, bounds[start] - window + 1)
        last = bounds[here.stop - 1] + 1
        keys, own = torch.arange(first, last, device=q.device), positions[here, None]
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        for head in range(kv_heads):
            rows = queries[head, :, here].to(torch.float32) * dim**-0.5
            scores = rows @ k[head, first:last].to(torch.float32).t()  # [shared, step, keys]
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            by_head[head, :, first:last] += weights.sum(1)
    return out


def check_mass(q: torch.Tensor, k: torch.Tensor, plan: AttentionPlan, counted: int) -> None:
    """Raises ValueError for what makes no sense as arguments of `mass`."""
    if not 0 <= counted <= len(plan) or len(q) != len(plan) or plan.bounds[-1] >= k.shape[1]:
        raise ValueError(
            f"the last {counted} of {len(q)} queries, {len(plan)} positions, the last "
            f"{plan.bounds[-1]}, in a KV cache of {k.shape[1]}"
        )
    if q.shape[1] % k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"queries {tuple(q.shape)} and keys {tuple(k.shape)} don't go together")
