"""Who shares a model's heads: one process, or several that work in lockstep."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Share:
    """A rank's part of a model's kv heads: `count` of them from `first` on, each of which `copies`
    ranks have."""

    first: int
    count: int
    copies: int = 1

    @classmethod
    def of(cls, rank: int, size: int, kv_heads: int) -> "Share":
        """Consecutive heads, one rank after the other; where there are more ranks than heads,
        consecutive ranks have the same one. One number must divide the other."""
        if size <= kv_heads:
            return cls(rank * (kv_heads // size), kv_heads // size)
        copies = size // kv_heads
        return cls(rank // copies, 1, copies)

    def slice(self) -> slice:
        return slice(self.first, self.first + self.count)


class Ranks:
    """The ranks that a model is split over by its heads, as one of them sees them: here, one alone.

    All ranks make the same calls in the same order; each call waits for the others. Hidden states
    are whole, and the same, on every rank.
    """

    rank = 0
    size = 1
    share: Share | None = None  # all heads

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes, counts and reports for all."""
        return self.rank == 0

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """What is made of each rank's own heads, float32, added up over the ranks."""
        return x

    def kv_summed(self, x: torch.Tensor) -> torch.Tensor:
        """As `summed`, of kv heads: each counts once, though several ranks may have it."""
        return self.summed(x) if self.share is None else self.summed(x) / self.share.copies

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """float32, each number the largest of any rank."""
        return x

    def chosen(self, indices: torch.Tensor, count: int) -> torch.Tensor:
        """Rank 0's indices, int64, rising, below `count`, whatever the others chose."""
        return indices

    def whole(self, kv: torch.Tensor) -> torch.Tensor:
        """K or V on the host, [..., heads, head_dim], of the rank's own kv heads -> of all. On rank
        0; the others keep theirs."""
        return kv

    def exchanged(self, said: str, seconds: float | None = None) -> tuple[str, ...]:
        """What each rank has to say, by rank. Cheap where it is nothing. Raises TimeoutError where
        not all ranks come here within some seconds: they are out of step then, and must end."""
        return (said,)


ALONE = Ranks()
