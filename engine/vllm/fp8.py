"""KV as vLLM's blocks round it where they hold fp8."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from engine.kv_cache import KVCache
from engine.model import Decoder

_KINDS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def fp8_kind(attention: Mapping[str, Any]) -> torch.dtype | None:
    """The type in the blocks of vLLM's attention layers; None where it isn't fp8."""
    return _KINDS.get(next(iter(attention.values())).kv_cache_dtype)


def in_fp8(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`x` as it comes back from vLLM's blocks. vLLM's CPU backend cuts bits off, others round."""
    most = torch.finfo(kind).max
    y = x.float().clamp(-most, most)
    if x.device.type != "cpu":
        return y.to(kind).to(x.dtype)
    bits = 3 if kind == torch.float8_e4m3fn else 2
    least = torch.finfo(kind).smallest_normal
    step = least / 2**bits  # below the smallest normal number
    cut = (y.view(torch.int32) >> 23 - bits << 23 - bits).view(torch.float32)
    return torch.where(y.abs() < least, (y / step).trunc() * step, cut).to(x.dtype)


@contextmanager
def rounded(model: Decoder, attention: Mapping[str, Any]) -> Iterator[None]:
    """Lets the model's staged KV be rounded as vLLM's blocks round it, where they hold fp8.

    vLLM attends to what its blocks hold, blending to what it computed, which is the better of the
    two. Without that difference the two are as close as with unquantised KV.
    """
    kind, layers = fp8_kind(attention), list(attention.values())
    if kind is None:
        yield
        return
    store, store_runs = model.store, model.store_runs

    def round_layer(layer: int, cache: KVCache) -> None:
        scales = layers[layer]._k_scale_float, layers[layer]._v_scale_float
        for x, scale in zip((cache.k[layer], cache.v[layer]), scales, strict=True):
            x.copy_(in_fp8(x / scale, kind) * scale)

    def stored(layer: int, cache: KVCache, *args: Any) -> None:
        store(layer, cache, *args)
        round_layer(layer, cache)

    def stored_runs(layer: int, cache: KVCache, *args: Any) -> None:
        store_runs(layer, cache, *args)
        round_layer(layer, cache)

    model.store, model.store_runs = stored, stored_runs  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del model.store, model.store_runs
