"""Question attention: recompute what the question looks at.

Tokens that deviate are of no account where the question doesn't look ("crowding out": ProphetKV,
arXiv 2602.02579). So the question runs over the reused KV first, and a token is worth the attention
it gets there times the size of what it is read for, its V.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from cache_store.errors import UsageError
from engine.policies.base import Candidates, Policy, Signal
from engine.policies.params import layer_span, one_of
from engine.ranks import Ranks

Heads = Literal["sum", "max"]
Weight = Literal["value", "none"]

# Of a model's layers, the first that counts unless said otherwise, as a share. Measured.
FIRST_SHARE = 0.25


@dataclass(frozen=True)
class Question(Policy):
    """layers: first and last of those whose attention counts, each with the same weight; None: from
    a quarter of the model on. heads: summed, or the one that looks hardest. weight: attention times
    the norm of V, or attention alone."""

    layers: tuple[int, int] | None = None
    heads: Heads = "sum"
    weight: Weight = "value"
    name = "question"
    transfers = True

    @classmethod
    def of(cls, params: Mapping[str, str]) -> "Question":
        span = params.get("layers")
        return cls(
            None if span is None else layer_span("question", span),
            one_of("question", "heads", params.get("heads", "sum"), ("sum", "max")),
            one_of("question", "weight", params.get("weight", "value"), ("value", "none")),
        )

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"question"})

    def question_layers(self, layers: int) -> range:
        first, last = self.layers or (int(FIRST_SHARE * layers), layers - 1)
        if last >= layers:
            raise UsageError(
                f"policy question: layer {last} is not in this model of {layers} layers",
                f"use layers=0-{layers - 1}, or less",
            )
        return range(first, last + 1)

    def looks(self, mass: torch.Tensor, value_norms: torch.Tensor) -> torch.Tensor:
        if self.weight == "value":
            mass.view(len(value_norms), -1, mass.shape[1]).mul_(value_norms[:, None])
        return mass.sum(0) if self.heads == "sum" else mass.amax(0)

    def joined(self, looks: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return ranks.summed(looks) if self.heads == "sum" else ranks.largest(looks)

    def score(self, candidates: Candidates) -> torch.Tensor:
        looks = candidates.question  # [layers, T]
        if looks is None:
            raise ValueError("policy question needs what the question looks at")
        # V is larger in late layers: none of them is to count more for that.
        return (looks / looks.sum(-1, keepdim=True).clamp_min(1e-30)).sum(0)
