"""KV deviation: the paper's score (CacheBlend, arXiv 2405.16444, section 4.2) and its relatives.

Rotation keeps distances, so deviation before RoPE equals deviation at the final position.
"""

from dataclasses import dataclass

import torch

from engine.policies.base import Candidates, LayerKV, Policy


def squared_distance(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance per token of [T, heads, dim] tensors, float32 [T]."""
    return (fresh.float() - cached.float()).square().flatten(1).sum(1)


def _pair(candidates: Candidates) -> tuple[LayerKV, LayerKV]:
    if candidates.fresh is None or candidates.cached is None:
        raise ValueError("a deviation policy needs fresh and cached KV")
    return candidates.fresh, candidates.cached


@dataclass(frozen=True)
class ValueDeviation(Policy):
    """Deviation of V at the check layer: CacheBlend's own choice."""

    name = "value"
    needs_deviation = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        return squared_distance(fresh.v, cached.v)


@dataclass(frozen=True)
class KeyDeviation(Policy):
    """Deviation of K at the check layer: LMCache's choice."""

    name = "key"
    needs_deviation = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        return squared_distance(fresh.k, cached.k)


@dataclass(frozen=True)
class KeyValueDeviation(Policy):
    """Deviation of K and V together: the two squared distances, added."""

    name = "key+value"
    needs_deviation = True

    def score(self, candidates: Candidates) -> torch.Tensor:
        fresh, cached = _pair(candidates)
        return squared_distance(fresh.k, cached.k) + squared_distance(fresh.v, cached.v)
