"""vLLM's paged KV cache, written through the attention backend's own code."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cache_store.errors import UsageError
from engine.kv_cache import KVCache


class PagedKV:
    """The attention layers of one vLLM worker, in the model's order, and their blocks.

    What is where in a block is the backend's affair: only its own update writes them.
    """

    def __init__(self, attention: Mapping[str, Any], block_size: int, device: torch.device) -> None:
        """attention: vLLM's attention layers by name, in the model's order. Raises UsageError for a
        backend that doesn't write its cache apart from its forward."""
        self.attention = attention
        self._layers = list(attention.values())
        self.block_size, self._device = block_size, device
        if any(not hasattr(layer.impl, "do_kv_cache_update") for layer in self._layers):
            name = type(self._layers[0].impl).__name__
            raise UsageError(f"vLLM's attention {name} cannot be given KV from outside")

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Where tokens [start, end) of a request with these blocks are, int64 [end - start]."""
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        places = torch.arange(start, end)
        found = blocks[places // self.block_size] * self.block_size + places % self.block_size
        return found.to(self._device)

    def write(self, layer: int, cache: KVCache, start: int, slots: torch.Tensor) -> None:
        """Copies the staged KV of the positions from `start` on to as many slots."""
        k, v = cache.rows(layer, start, start + len(slots))
        if self._device.type != "cpu":  # whose backend alone reads heads wherever they are
            k, v = k.contiguous(), v.contiguous()
        self.put(layer, k, v, slots)

    def put(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Rotated K and V [T, kv_heads, head_dim] into T slots."""
        module = self._layers[layer]
        module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)
