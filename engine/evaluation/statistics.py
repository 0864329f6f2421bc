"""How sure a mean over questions is: bootstrap intervals, the same in every run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
SEED = 0
TAIL = 0.025  # on either side of an interval of 95%


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval; low and high are None for fewer than two questions."""

    value: float
    low: float | None
    high: float | None


class Bootstrap:
    """Draws `count` questions with replacement, RESAMPLES times; the same draws for every figure,
    so that two arms are compared on the same questions."""

    def __init__(self, count: int) -> None:
        self._draws = np.random.default_rng(SEED).integers(0, count, (RESAMPLES, count))

    def mean(self, values: Sequence[float]) -> Estimate:
        """Of one value a question."""
        array = np.asarray(values, dtype=np.float64)
        return _estimate(float(array.mean()), array[self._draws].mean(1), len(values))

    def recovery(self, values: Sequence[float], reuse: Sequence[float]) -> Estimate | None:
        """1 - mean of values / mean of reuse; None where the latter is 0: nothing was lost."""
        ours, base = np.asarray(values, dtype=np.float64), np.asarray(reuse, dtype=np.float64)
        if not base.mean():
            return None
        below = base[self._draws].mean(1)
        drawn = 1 - ours[self._draws].mean(1)[below > 0] / below[below > 0]
        return _estimate(float(1 - ours.mean() / base.mean()), drawn, len(values))


def _estimate(value: float, drawn: "np.ndarray[Any, np.dtype[np.float64]]", count: int) -> Estimate:
    if count < 2 or not len(drawn):
        return Estimate(value, None, None)
    low, high = np.quantile(drawn, (TAIL, 1 - TAIL))
    return Estimate(value, float(low), float(high))
