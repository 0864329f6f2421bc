"""The first tokens of each chunk: EPIC's choice (arXiv 2410.15332).

They are what a chunk's later tokens look at most when it stands alone, and what has to learn that
it doesn't.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.policies.base import Candidates, Policy
from engine.policies.params import whole


@dataclass(frozen=True)
class FirstK(Policy):
    """k: how many of each chunk, whatever the ratio; None: as many as the ratio allows."""

    k: int | None = None
    name = "first-k"
    amounts = False

    @classmethod
    def of(cls, params: Mapping[str, str]) -> "FirstK":
        return cls(whole("first-k", "k", params["k"]) if "k" in params else None)

    def score(self, candidates: Candidates) -> torch.Tensor:
        return -candidates.offsets.float()

    def count(self, candidates: Candidates, budget: int) -> int:
        return budget if self.k is None else int((candidates.offsets < self.k).sum())
