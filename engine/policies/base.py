"""What every selection policy is given and must return, and how a score becomes a selection."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import torch


@dataclass(frozen=True)
class LayerKV:
    """K before RoPE and V of the same tokens at one layer, each [T, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The tokens to choose from at one layer, in order of position.

    positions: int64 [T]. fresh and cached are None for a policy that needs no deviation.
    """

    positions: torch.Tensor
    fresh: LayerKV | None = None
    cached: LayerKV | None = None


class Policy(ABC):
    """Scores candidates.

    `needs_deviation`: the layers up to the first check layer are computed for all candidates, so
    that fresh K and V exist there; otherwise recomputing narrows from layer 0 on.
    """

    name: ClassVar[str]
    needs_deviation: ClassVar[bool]

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor:
        """float32 [T]; higher is more worth recomputing."""

    def count(self, candidates: Candidates, budget: int) -> int:
        """How many candidates to choose, given what the ratio allows."""
        return budget


def budget(ratio: Decimal, eligible: int, cached: int) -> int:
    """min(eligible, ceil(ratio * cached)), in exact arithmetic."""
    return min(eligible, math.ceil(Fraction(ratio) * cached))


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64 [count] of the highest scores, ascending; ties go to the lower index."""
    scores = torch.nan_to_num(scores.float(), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = torch.sort(scores, descending=True, stable=True).indices[:count]
    return best.sort().values
