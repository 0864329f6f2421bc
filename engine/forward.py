"""Plain causal computation of consecutive tokens: full prefill, chunk KV, decoding steps."""

from collections.abc import Callable, Sequence

import torch

from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.rope import Tables
from engine.timing import Stopwatch

Capture = Callable[[int, torch.Tensor, torch.Tensor], None]


@torch.inference_mode()
def forward(
    model: Decoder,
    cache: KVCache,
    token_ids: Sequence[int],
    tables: Tables,
    *,
    last: int | None = 1,
    capture: Capture | None = None,
    watch: Stopwatch | None = None,
) -> torch.Tensor:
    """Runs tokens at positions `cache.length`… and appends their K and V to the cache.

    tables: cos and sin of the sequence's regime, at least as many rows as the cache then holds
    (`Rope.tables`). last: logits for the last so many tokens, None for all, 0 for none: the last
    layer then stops after its K and V. capture(layer, k, v) sees K before RoPE and V, each
    [T, kv_heads, head_dim], and may keep them. watch: learns of each layer. Returns float32
    [last, vocab].
    """
    tokens, start = len(token_ids), cache.length
    end = start + tokens
    wanted = tokens if last is None else min(last, tokens)
    plan = model.plan(list(range(start, end)))
    x = model.embed(torch.tensor(token_ids, device=model.device))
    rows = tables[start:end]
    for layer in range(model.config.layers):
        if watch is not None:
            watch.computing(layer)
        normed = model.norm_in(layer, x)
        k, v = model.keys_values(layer, normed)
        if capture is not None:
            capture(layer, k, v)
        model.store(layer, cache, (start, end), k, v, rows)
        if layer == model.config.layers - 1 and wanted < tokens:
            if wanted == 0:
                break
            x, normed, plan = x[-wanted:], normed[-wanted:], plan.last(wanted)
            rows = rows[-wanted:]
        q = model.rotated(layer, model.queries(layer, normed), rows)
        x = model.finish(layer, x, model.attend(layer, q, cache, plan))
    cache.length = end
    if watch is not None:
        watch.through()
    return model.logits(x) if wanted else x.new_empty((0, model.config.vocab), dtype=torch.float32)
