"""What recomputing some tokens teaches about their neighbours.

Stored KV deviates from that of a full prefill in part by the same amount all along a stretch of a
chunk: what stands before the chunk moves all its tokens alike. The recomputed tokens show by how
much, at every layer, for fresh and stored K and V of them are at hand. So the tokens that are not
recomputed are moved by what their neighbours deviate on average. It costs one addition to the KV
cache, and takes away more of the error than as many recomputed tokens again.

The average is that of the recomputed tokens in the same block, drawn towards that of the chunk as
if `TO_CHUNK` more had deviated like the chunk; the chunk's is drawn towards none as if `TO_NONE`
more had not deviated at all, and counts by the share of the chunk that is left as it was: few
tokens prove little, and the more the question's favourites are recomputed, the less the others are
like them. Measured, like the size of a block, on questions over retrieved passages with the default
model.
"""

from collections.abc import Sequence

import torch

from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.policies import LayerKV
from engine.rope import Tables, unrotate
from engine.sources import Source

BLOCK = 64
TO_CHUNK, TO_NONE = 5.0, 10.0


class Transfer:
    """Which stored tokens are moved by which recomputed ones: for one set of the latter.

    Exact chunks are not moved, nor are chunks of which nothing is recomputed.
    """

    def __init__(
        self, model: Decoder, tables: Tables, hits: Sequence[Source], recomputed: Sequence[int]
    ) -> None:
        """hits: chunks whose KV is not exact, in order; recomputed: positions in them, rising."""
        self.model, self.tables = model, tables
        self.positions = torch.tensor(recomputed, dtype=torch.int64, device=model.device)
        self._rows = tables[self.positions]
        spans: list[tuple[int, int]] = []
        weights: list[torch.Tensor] = []
        at = torch.tensor(recomputed, dtype=torch.int64)
        for source in hits:
            start, end = source.segment.start, source.segment.end
            mine = (at >= start) & (at < end)
            if mine.any():
                left = 1 - mine.sum() / (end - start)
                chunk = mine / (mine.sum() + TO_NONE)
                for first in range(start, end, BLOCK):
                    last = min(first + BLOCK, end)
                    near = (at >= first) & (at < last)
                    weights.append(left * (near + TO_CHUNK * chunk) / (near.sum() + TO_CHUNK))
                    spans.append((first, last))
        self._spans = torch.tensor(spans, dtype=torch.int64).view(-1, 2).t().contiguous()
        self._weights = torch.stack(weights).to(model.device) if weights else None  # [S, T]

    def __call__(self, layer: int, cache: KVCache, fresh: LayerKV) -> None:
        """Moves stored KV in the cache at one layer, where it is still as it was stored.

        fresh: K before RoPE and V of the recomputed tokens, which are not in the cache yet.
        """
        if self._weights is None:
            return
        shape = fresh.k.shape[1:]
        stored_k, stored_v = (
            x[layer][:, self.positions].transpose(0, 1) for x in (cache.k, cache.v)
        )
        stored_k = stored_k.float()  # [T, kv_heads, head_dim]
        rows = self._rows.layer(layer)
        if rows is not None:
            stored_k = unrotate(stored_k, *rows)
        deviation = torch.stack([fresh.k.float() - stored_k, fresh.v.float() - stored_v.float()], 1)
        shifts = (self._weights @ deviation.flatten(1)).view(-1, 2, *shape)
        self.model.shift(layer, cache, self._spans, shifts, self.tables)
