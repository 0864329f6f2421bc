"""Taking times in turn, so that what else the machine does falls on all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing. Not empty."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


def in_turn(
    ways: Mapping[K, Callable[[], V]], rounds: int, on_round: Callable[[int], None]
) -> dict[K, list[V]]:
    """Results of `rounds` rounds in which every way has its turn, after one that only warms up.

    on_round gets the number of the round that begins, 0 for the warm-up.
    """
    results: dict[K, list[V]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        on_round(turn)
        for name, run in ways.items():
            result = run()
            if turn:
                results[name].append(result)
    return results


def paired(reference: Sequence[float], other: Sequence[float]) -> Spread:
    """How many times shorter `other` was than `reference`, round by round."""
    return Spread(tuple(a / b for a, b in zip(reference, other, strict=True)))


def telling(on_round: Callable[[str], None], what: str, rounds: int) -> Callable[[int], None]:
    """`in_turn`'s callback that tells in words which round begins."""

    def tell(turn: int) -> None:
        on_round(f"{what}: " + (f"round {turn} of {rounds}" if turn else "warming up"))

    return tell
