"""The KV cache one prompt is answered from: rotated keys and values, by absolute position."""

import torch

from engine.config import ModelConfig


class KVCache:
    """Per layer, `k` and `v` [kv_heads, capacity, head_dim]; row p belongs to position p.

    Allocated once at its final size (prompt plus answer). `length` is the number of positions
    that hold a token; rows past it are undefined and never read.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, memory: torch.Tensor, *, passing: bool = False
    ) -> None:
        """memory: at least `size(config, capacity, passing)` elements, flat. passing: all layers
        share the memory of one, so a layer is there until the next one is written."""
        shape = (2, 1 if passing else config.layers, config.kv_heads, capacity, config.head_dim)
        held = memory[: self.size(config, capacity, passing=passing)].view(shape)
        self.k, self.v = held.expand(-1, config.layers, -1, -1, -1)
        self.capacity, self.passing = capacity, passing
        self.length = 0

    @staticmethod
    def size(config: ModelConfig, capacity: int, *, passing: bool = False) -> int:
        """Elements of K and V together."""
        layers = 1 if passing else config.layers
        return 2 * layers * config.kv_heads * capacity * config.head_dim

    def take(self, other: "KVCache", length: int) -> None:
        """Copies the first so many positions of another one of the same model."""
        self.k[:, :, :length] = other.k[:, :, :length]
        self.v[:, :, :length] = other.v[:, :, :length]
        self.length = length

    def rows(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable views [end - start, kv_heads, head_dim] of a run of positions."""
        return (
            self.k[layer, :, start:end].transpose(0, 1),
            self.v[layer, :, start:end].transpose(0, 1),
        )
