"""Shares of several policies: each has its part of the budget."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import torch

from cache_store.errors import UsageError
from engine.policies.base import Candidates, Policy, Signal
from engine.policies.params import brief, positive
from engine.ranks import Ranks

DEFAULT = {"question": "3", "value": "1"}


@dataclass(frozen=True)
class Hybrid(Policy):
    """The policies take turns at picking their best token, in proportion to their shares, until the
    budget is used up. A token that two of them pick counts once."""

    parts: tuple[tuple[Policy, Decimal], ...]
    name = "hybrid"
    transfers = True
    amounts = False

    @classmethod
    def of(cls, params: Mapping[str, str], known: Mapping[str, Policy]) -> "Hybrid":
        """known: what may have a share, by name. Raises UsageError."""
        shares = params or DEFAULT
        for name in shares:
            if name not in known:
                raise UsageError(
                    f"policy hybrid: {brief(name)!r} can have no share",
                    "it may be " + ", ".join(known),
                )
        return cls(tuple((known[name], positive("hybrid", name, v)) for name, v in shares.items()))

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset[Signal]().union(*(policy.needs for policy, _ in self.parts))

    def question_layers(self, layers: int) -> range:
        asked = [policy.question_layers(layers) for policy, _ in self.parts]
        return next((span for span in asked if len(span)), range(0))

    def looks(self, mass: torch.Tensor, value_norms: torch.Tensor) -> torch.Tensor:
        return self._asking.looks(mass, value_norms)

    def joined(self, looks: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return self._asking.joined(looks, ranks)

    @property
    def _asking(self) -> Policy:
        return next(policy for policy, _ in self.parts if "question" in policy.needs)

    def score(self, candidates: Candidates) -> torch.Tensor:
        # Its n-th best token is picked by a policy of share s at the time n/s: the earliest counts.
        turns = torch.stack(
            [_ranks(policy.score(candidates)) / float(share) for policy, share in self.parts]
        )
        return -turns.amin(0)

    def compared(self, kv_width: int, width: int) -> int:
        return sum(policy.compared(kv_width, width) for policy, _ in self.parts)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """1 for the highest score, 2 for the next; ties in order. float32 [T]."""
    order = torch.sort(scores, descending=True, stable=True).indices
    ranks = torch.empty(len(scores), device=scores.device)
    ranks[order] = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float32)
    return ranks
