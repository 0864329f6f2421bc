"""Selection by the caller's own list of prompt positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache_store.errors import UsageError
from engine.policies.base import Candidates, Policy


@dataclass(frozen=True)
class Explicit(Policy):
    """Recomputes the cached tokens at the given prompt positions, and no others.

    The ratio plays no part. Positions of exact tokens are left out: recomputing changes nothing.
    """

    indices: tuple[int, ...]
    name = "explicit"
    amounts = False

    @classmethod
    def of(cls, indices: Sequence[int] | None) -> "Explicit":
        if indices is None:
            raise UsageError("policy explicit needs positions", "give them with --indices")
        if any(index < 0 for index in indices):
            raise UsageError("a position below 0 was given to policy explicit")
        return cls(tuple(sorted(set(indices))))

    def score(self, candidates: Candidates) -> torch.Tensor:
        wanted = torch.tensor(self.indices, dtype=torch.int64, device=candidates.positions.device)
        return torch.isin(candidates.positions, wanted).float()

    def count(self, candidates: Candidates, budget: int) -> int:
        return int(self.score(candidates).sum())
