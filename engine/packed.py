"""Many chunks computed at once, each alone behind the same context."""

from collections.abc import Sequence

import torch

from engine.forward import Capture
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.rope import Tables


@torch.inference_mode()
def forward_packed(
    model: Decoder,
    cache: KVCache,
    chunks: Sequence[Sequence[int]],
    tables: Tables,
    capture: Capture,
) -> None:
    """Runs chunks as if each were the only one behind what `cache` holds.

    The tokens of all of them go through the linear layers together; each chunk attends to the
    context and to itself. So a chunk's KV doesn't depend on the others but in rounding: a product
    may round otherwise for another number of rows in all, and for the same number gives the same
    bits.

    cache: holds the context, with room for the longest chunk, whose rows are scratch before and
    after. tables: cos and sin of the one length regime that context and chunk are in, for each of
    the chunks (`Rope.tables`). capture(layer, k, v) sees K before RoPE and V of all chunks, one
    after the other, each [tokens, kv_heads, head_dim].
    """
    start, last_layer = cache.length, model.config.layers - 1
    runs = {n: list(range(start, start + n)) for n in map(len, chunks)}
    plans = {n: model.plan(run) for n, run in runs.items()}
    own = {n: tables[start : start + n] for n in runs}
    positions = torch.tensor([p for chunk in chunks for p in runs[len(chunk)]], device=model.device)
    rows = tables[positions]
    x = model.embed(torch.tensor([i for chunk in chunks for i in chunk], device=model.device))
    attention = x.new_empty((len(x), model.config.heads * model.config.head_dim))
    for layer in range(last_layer + 1):
        normed = model.norm_in(layer, x)
        k, v = model.keys_values(layer, normed)
        capture(layer, k, v)
        if layer == last_layer:
            return
        q = model.rotated(layer, model.queries(layer, normed), rows)
        first = 0
        for n in map(len, chunks):
            part, end = slice(first, first + n), start + n
            model.store(layer, cache, (start, end), k[part], v[part], own[n])
            attention[part] = model.attend(layer, q[part], cache, plans[n])
            first += n
        x = model.finish(layer, x, attention)
