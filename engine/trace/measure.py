"""How far stored KV is from full prefill's, token by token: what a trace of level `full` adds."""

from collections.abc import Sequence

import numpy as np
import torch

from cache_store.errors import UsageError
from engine.codec import Codec
from engine.forward import forward
from engine.loaders import make_loader
from engine.model import Decoder
from engine.policies import LayerKV
from engine.policies.deviation import squared_distance
from engine.sources import KVStore, Source
from engine.timing import Stopwatch
from engine.trace.record import Deviations, Floats

LAYERS = 8  # that are measured unless said otherwise, from layer 1 to the last
_MOST = float(np.finfo(np.float32).max)


def measured_layers(layers: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Those of a model's layers to measure: `wanted`, or a few spread over it. Raises UsageError
    for a layer that it does not have."""
    if wanted is None:
        return tuple(
            sorted({round(x) for x in np.linspace(min(1, layers - 1), layers - 1, LAYERS)})
        )
    outside = [layer for layer in wanted if not 0 <= layer < layers]
    if outside:
        raise UsageError(
            f"trace layer {outside[0]} is not in this model of {layers} layers",
            f"use --trace-layers with layers up to {layers - 1}",
        )
    return tuple(sorted(set(wanted)))


class FullKV:
    """Keeps full prefill's K before RoPE and V of some layers; a `forward.Capture`."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.kept: dict[int, LayerKV] = {}

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer in self.layers:
            self.kept[layer] = LayerKV(k, v)

    def compute(self, model: Decoder, token_ids: Sequence[int]) -> None:
        """Prefills the whole prompt for it."""
        cache = model.new_cache(len(token_ids))
        forward(model, cache, token_ids, model.rope.tables(len(token_ids)), last=0, capture=self)


@torch.inference_mode()
def deviations(
    model: Decoder, store: KVStore, codec: Codec, sources: Sequence[Source], full: FullKV
) -> Deviations:
    """Squared L2 distance of the cached tokens' stored K (before RoPE) and V from full prefill's,
    which is dropped layer by layer.

    codec: of the store. sources: of the prompt, some of them cached. Raises DamagedSource, also for
    an entry that is no longer there.
    """
    cached = [source for source in sources if source.cached]
    spans = [(source.segment.start, source.segment.end) for source in cached]
    positions = np.concatenate([np.arange(*span, dtype=np.int32) for span in spans])
    found: dict[int, tuple[Floats, Floats]] = {}
    keys = [source.match.key for source in cached if source.match is not None]
    with (
        store.pinned(keys),
        make_loader("pipelined", model, store, cached, Stopwatch(), codec) as loader,
    ):
        loader.start()
        for layer in range(max(full.layers) + 1):
            loaded = loader.layer(layer)
            fresh = full.kept.pop(layer, None)
            if fresh is not None:
                pairs = [
                    (
                        fresh.k[part.start : part.end],
                        part.kv.k,
                        fresh.v[part.start : part.end],
                        part.kv.v,
                    )
                    for part in loaded
                ]
                k = torch.cat([squared_distance(a, b) for a, b, _, _ in pairs])
                v = torch.cat([squared_distance(a, b) for _, _, a, b in pairs])
                found[layer] = _numbers(k), _numbers(v)
            loader.release()
    rows = [found[layer] for layer in full.layers]
    return Deviations(
        full.layers, positions, np.stack([k for k, _ in rows]), np.stack([v for _, v in rows])
    )


def _numbers(values: torch.Tensor) -> Floats:
    """float32 on the host, finite: what is not a number deviates as much as can be."""
    numbers: Floats = values.float().cpu().numpy()
    finite: Floats = np.nan_to_num(numbers, nan=_MOST, posinf=_MOST, neginf=0.0)
    return finite
