"""What every selection policy is given and must return, and how a score becomes a selection."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar, Literal

import torch

from engine.ranks import ALONE, Ranks

Signal = Literal["deviation", "output", "question"]
"""What a score is made from, besides where a token stands.

deviation: fresh and cached K and V at the check layer; output: attention's output there from fresh
and from cached KV; question: how the question attends to the cached tokens.
"""


@dataclass(frozen=True)
class LayerKV:
    """K before RoPE and V of the same tokens at one layer, each [T, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Outputs:
    """Attention's output of the same tokens at one layer, each [T, heads * head_dim]: all of them
    over fresh KV, and over the KV that was cached."""

    fresh: torch.Tensor
    cached: torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The tokens to choose from at one layer, in order of position.

    positions: in the prompt, int64 [T]; offsets: in the token's own chunk, int64 [T]; question: a
    row of `Policy.looks` for each of its question layers, of all heads, float32 [layers, T]. The
    rest is of this rank's heads, and None where the policy doesn't need it; ranks: who has the
    others.
    """

    positions: torch.Tensor
    offsets: torch.Tensor
    fresh: LayerKV | None = None
    cached: LayerKV | None = None
    outputs: Outputs | None = None
    question: torch.Tensor | None = None
    ranks: Ranks = ALONE


class Policy(ABC):
    """Scores candidates. A frozen dataclass, whose fields are its parameters.

    `needs`: what its score is made from. `amounts`: scores are amounts, 0 or more, that can be
    added up, as a threshold does. `transfers`: whether what the chosen tokens show is carried over
    to their neighbours (`engine.transfer`) unless said otherwise.
    """

    name: ClassVar[str]
    amounts: ClassVar[bool] = True
    transfers: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    @property
    def full_layers(self) -> bool:
        """Whether the layers up to the first check layer are computed for all candidates; otherwise
        recomputing narrows from layer 0 on. Of L layers with check layer c, a blend then takes at
        least (c + 1)/L of a full prefill."""
        return not self.needs.isdisjoint({"deviation", "output"})

    def question_layers(self, layers: int) -> range:
        """At which of so many layers the question's attention is taken; none, unless needed. Raises
        UsageError for layers that the model does not have."""
        return range(0)

    def looks(self, mass: torch.Tensor, value_norms: torch.Tensor) -> torch.Tensor:
        """How much the question looks at each of N tokens at one of its layers, float32 [N].

        mass: attention each gets while the question reads the reused KV, summed over the question's
        tokens, float32 [heads, N], which may be overwritten; value_norms: L2 norm of its V, float32
        [kv_heads, N]."""
        return mass.sum(0)

    def joined(self, looks: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """What `looks` gave each rank for its own heads, float32 [layers, N], as of all heads."""
        return ranks.summed(looks)

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor:
        """float32 [T], of all heads on every rank; higher is more worth recomputing."""

    def count(self, candidates: Candidates, budget: int) -> int:
        """How many candidates to choose, given what the ratio allows."""
        return budget

    def compared(self, kv_width: int, width: int) -> int:
        """Numbers that are compared for each candidate: K or V has kv_width, attention's output
        width."""
        return 0


def budget(ratio: Decimal, eligible: int, cached: int) -> int:
    """min(eligible, ceil(ratio * cached)), in exact arithmetic."""
    return min(eligible, math.ceil(Fraction(ratio) * cached))


def covering(scores: torch.Tensor, share: Decimal) -> int:
    """The fewest tokens that hold `share` of the sum of the scores [T] (below 0 counts as 0).

    Share 0 is no token, share 1 all of them, also those whose score is 0.
    """
    if share <= 0 or share >= 1:
        return 0 if share <= 0 else len(scores)
    amounts = _ordered(scores).values.cpu().double()  # which not every device has
    amounts.clamp_(min=0, max=torch.finfo(torch.float32).max)
    held = amounts.cumsum(0)
    if not len(held) or held[-1] == 0:
        return 0
    return min(len(held), int((held < float(share) * held[-1]).sum()) + 1)


def select(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64 [count] of the highest scores, ascending; ties go to the lower index."""
    return _ordered(scores).indices[:count].sort().values


def _ordered(scores: torch.Tensor) -> torch.return_types.sort:
    """Highest first; NaN before all others, for what is not a number surely deviates."""
    scores = torch.nan_to_num(scores.float(), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.sort(scores, descending=True, stable=True)
