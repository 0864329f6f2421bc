"""FlexAttention over scattered positions: triton compiles it once, for whatever T and N."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import AttentionPlan

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # slow to import

TILE = 128  # queries, and keys, that are skipped or computed together


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask") -> Tensor:
    """q [1, heads, T, head_dim], k and v [1, kv_heads, N, head_dim] -> as q.

    Raises what torch's compilers raise, RuntimeError for the most part.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        return _compiled()(q, k, v, block_mask=mask, enable_gqa=True)
    except FailOnRecompileLimitHit as error:  # models of many shapes in one process
        raise RuntimeError(str(error)) from error


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=True, fullgraph=True)


def block_mask(plan: AttentionPlan, window: int | None) -> "BlockMask":
    """What a plan's queries see, tile by tile and, inside tiles, by position.

    Made on the device without waiting for it, and without a dense mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tokens, end = len(plan), plan.bounds[-1] + 1
    last = plan.positions.to(torch.int32)  # the keys a query sees: from `first` to `last`
    first = (last - (window or end) + 1).clamp_min(0)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= last[query]) & (key >= first[query])

    # Positions increase, so a tile's first and last query say which tiles of keys it needs.
    tops = torch.arange(0, tokens, TILE, device=last.device)
    ends = (tops + TILE - 1).clamp_max(tokens - 1)
    keys = torch.arange(0, end, TILE, device=last.device)
    some = (keys <= last[ends, None]) & (keys + TILE > first[tops, None])
    whole = (keys + TILE <= last[tops, None] + 1) & (keys >= first[ends, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(tokens, end),
        compute_q_blocks=False,  # for gradients
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [Q, K] -> how many are true in each row, and which, first: int32 [1, 1, Q(, K)]."""
    order = torch.argsort(tiles.to(torch.int32), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
