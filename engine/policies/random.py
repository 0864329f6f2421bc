"""Random selection: what every other policy has to beat."""

from dataclasses import dataclass

import torch

from engine.policies.base import Candidates, Policy

RANDOM = "random"


@dataclass(frozen=True)
class Random(Policy):
    """One pseudo-random score a position, from `seed` and the position alone.

    So the selection is repeatable, the same on every device, and nested for falling ratios.
    """

    seed: int = 0
    name = RANDOM
    amounts = False

    def score(self, candidates: Candidates) -> torch.Tensor:
        # A hash of 31 bits, so that products stay within int64.
        x = (candidates.positions + self.seed % 2**31 * 7_919 + 1) & 0x7FFFFFFF
        for factor in (0x45D9F3B, 0x119DE1F3, 0x2545F491):
            x = (x ^ (x >> 16)) * factor & 0x7FFFFFFF
        return (x ^ (x >> 15)).float()
