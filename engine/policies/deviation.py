"""KV deviation: the paper's score (CacheBlend, arXiv 2405.16444, section 4.2) and its relatives.

Rotation keeps distances, so deviation before RoPE equals deviation at the final position.
"""

from dataclasses import dataclass

import torch

from engine.policies.base import Candidates, LayerKV, Policy, Signal


def squared_distance(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance per token of [T, ...] tensors, float32 [T]."""
    return (fresh.float() - cached.float()).square().flatten(1).sum(1)


def _pair(candidates: Candidates) -> tuple[LayerKV, LayerKV]:
    if candidates.fresh is None or candidates.cached is None:
        raise ValueError("a deviation policy needs fresh and cached KV")
    return candidates.fresh, candidates.cached


@dataclass(frozen=True)
class _Deviation(Policy):
    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"deviation"})

    def compared(self, kv_width: int, width: int) -> int:
        return kv_width


@dataclass(frozen=True)
class ValueDeviation(_Deviation):
    """Deviation of V at the check layer: CacheBlend's own choice."""

    name = "value"

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        return candidates.ranks.kv_summed(squared_distance(fresh.v, cached.v))


@dataclass(frozen=True)
class KeyDeviation(_Deviation):
    """Deviation of K at the check layer: LMCache's choice."""

    name = "key"

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        return candidates.ranks.kv_summed(squared_distance(fresh.k, cached.k))


@dataclass(frozen=True)
class KeyValueDeviation(_Deviation):
    """Deviation of K and V together: the two squared distances, added."""

    name = "key+value"

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        apart = squared_distance(fresh.k, cached.k) + squared_distance(fresh.v, cached.v)
        return candidates.ranks.kv_summed(apart)

    def compared(self, kv_width: int, width: int) -> int:
        return 2 * kv_width


@dataclass(frozen=True)
class OutputDeviation(Policy):
    """Deviation of what a token itself reads: attention's output at the check layer from fresh KV,
    against that of the same query from the cached KV of the tokens before it (attention deviation,
    section 4.1 of the paper, of the layer's output)."""

    name = "attention"

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"output"})

    def score(self, candidates: Candidates) -> torch.Tensor:
        if candidates.outputs is None:
            raise ValueError("policy attention needs attention's outputs")
        outputs = candidates.outputs
        return candidates.ranks.summed(squared_distance(outputs.fresh, outputs.cached))

    def compared(self, kv_width: int, width: int) -> int:
        return width
