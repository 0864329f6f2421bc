"""From numbers to steps of a colour scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.trace.heat import edges

STEPS = 7
SCALES = ("log", "linear", "rank")
RAMP = " .:-=+*#"  # one for each step, 0 first, where there are no colours


@dataclass(frozen=True)
class Heat:
    """steps int8, of the values' shape: 0 for none or little, STEPS for the most; low, high: the
    values at the two ends of the scale, NaN where nothing has a value."""

    steps: npt.NDArray[np.int8]
    low: float
    high: float
    scale: str


def heat_of(values: npt.NDArray[np.float32], scale: str = "log") -> Heat:
    """log: from the median of what is above zero to the highest; linear: from 0 to the highest;
    rank: the same number of tokens in every step."""
    steps = np.zeros(values.shape, dtype=np.int8)
    known = np.isfinite(values)
    found = values[known].astype(np.float64)
    if not len(found) or found.max() <= 0:
        return Heat(steps, float("nan"), float("nan"), scale)
    high = float(found.max())
    if scale == "rank":
        order = np.empty(len(found), dtype=np.int64)
        order[np.argsort(found, kind="stable")] = np.arange(len(found))
        steps[known] = np.rint(order * STEPS / max(1, len(found) - 1))
        return Heat(steps, float(found.min()), high, scale)
    if scale == "linear":
        share = found / high
        low = 0.0
    else:
        low = _median(found[found > 0])
        low = low if low < high else high / 2
        share = np.log(np.maximum(found, 1e-300) / low) / np.log(high / low)
    steps[known] = np.clip(np.ceil(share * STEPS - 1e-9), 0, STEPS).astype(np.int8)
    return Heat(steps, low, high, scale)


def _median(values: npt.NDArray[np.float64]) -> float:
    """np.median, which imports numpy.ma: 20 ms before the first screen."""
    middle = ((len(values) - 1) // 2, len(values) // 2)
    return float(np.partition(values, middle)[list(middle)].mean())


def pool_mean(
    values: npt.NDArray[np.float32], columns: int, rows: int | None = None
) -> npt.NDArray[np.float32]:
    """values [R, C] made no longer than asked, the mean of each block: for shares, as
    `engine.trace.heat.pooled` does it with the highest."""
    out = values
    for axis, size in ((0, rows or values.shape[0]), (1, columns)):
        have = out.shape[axis]
        if have > size > 0:
            cut = edges(have, size)
            counts = np.diff(cut).reshape((-1, 1) if axis == 0 else (1, -1))
            out = (np.add.reduceat(out, cut[:-1], axis=axis) / counts).astype(np.float32)
    return out
