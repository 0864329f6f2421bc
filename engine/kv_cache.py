"""The KV cache one prompt is answered from: rotated keys and values, by absolute position."""

import torch

from engine.config import ModelConfig


class KVCache:
    """Per layer, `k` and `v` [kv_heads, capacity, head_dim]; row p belongs to position p.

    Allocated once at its final size (prompt plus answer). `length` is the number of positions
    that hold a token; rows past it are undefined and never read.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.length = 0

    def rows(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable views [end - start, kv_heads, head_dim] of a run of positions."""
        return (
            self.k[layer, :, start:end].transpose(0, 1),
            self.v[layer, :, start:end].transpose(0, 1),
        )
