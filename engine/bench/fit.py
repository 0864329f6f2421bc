"""A line through measured costs: whether they grow as they should."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """y = intercept + slope * x, by least squares. r2: the share of y's variance it explains."""

    slope: float
    intercept: float
    r2: float
    points: int


def linear_fit(xs: Sequence[float], ys: Sequence[float]) -> Fit | None:
    """The line through the points, or None for fewer than three different x: two always fit."""
    if len(set(xs)) < 3:
        return None
    slope, intercept = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    total = sum((y - mean) ** 2 for y in ys)
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Fit(slope, intercept, 1 - left / total if total else 1.0, len(xs))
