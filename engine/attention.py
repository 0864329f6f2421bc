"""Exact causal attention by absolute position, for any increasing set of query positions."""

import torch
import torch.nn.functional as F

# Queries that share one call: large enough to amortise the call, small enough that keys past a
# block's first position (masked, so wasted) stay few. Measured on 2 AVX-512/AMX cores.
BLOCK = 128


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    bounds: list[int],
    window: int | None = None,
) -> torch.Tensor:
    """Attention of queries at scattered positions over one layer's KV cache.

    q: [T, heads, head_dim], rotated; k, v: [kv_heads, N, head_dim], k rotated, row i at position
    i; positions: int64 [T], strictly increasing, on q's device; bounds: the same as a list (no
    device sync here). A query at p sees keys max(0, p - window + 1)..p, all of them and no later
    one, whatever else is in the cache. Returns [T, heads * head_dim].

    The mask is by position, never by the queries' place in the block: aligned to the bottom
    right, scattered queries would see the future.
    """
    tokens = q.shape[0]
    queries = q.transpose(0, 1)[None]  # [1, heads, T, head_dim]
    if window is None and bounds[-1] == tokens - 1:  # 0..T-1: plain causal prefill
        out = F.scaled_dot_product_attention(
            queries, k[None, :, :tokens], v[None, :, :tokens], is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(tokens, -1)
    out = q.new_empty(q.shape)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        last = bounds[end - 1] + 1
        first = 0 if window is None else max(0, bounds[start] - window + 1)
        # A lone query sees the whole slice: it ends at its own position and begins in its window.
        mask = None if end - start == 1 else _mask(positions[start:end], first, last, window)
        block = F.scaled_dot_product_attention(
            queries[:, :, start:end],
            k[None, :, first:last],
            v[None, :, first:last],
            attn_mask=mask,
            enable_gqa=True,
        )
        out[start:end] = block[0].transpose(0, 1)
    return out.view(tokens, -1)


def _mask(positions: torch.Tensor, first: int, last: int, window: int | None) -> torch.Tensor:
    """bool [T, last - first]: which keys each query sees."""
    keys = torch.arange(first, last, device=positions.device)
    seen = keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    return seen
