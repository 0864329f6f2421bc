"""Whether one layer's deviation predicts another's: the claim that tokens are chosen by."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.trace.record import Deviations, Floats, Ints, Trace

_Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerOverlap:
    """One layer beside the check layer. jaccard: of the two sets of top tokens, 0 to 1; spearman:
    of all tokens' ranks, -1 to 1, None where one of the layers has the same deviation throughout,
    or fewer than two tokens."""

    layer: int
    jaccard: float
    spearman: float | None


def of_trace(trace: Trace, check_layer: int, count: int, part: str = "v") -> list[LayerOverlap]:
    """`overlaps` among the tokens that could be chosen: the cached ones that are not exact. Empty
    where nothing was measured."""
    if trace.deviations is None:
        return []
    hits = np.zeros(len(trace.tokens.ids), dtype=bool)
    for segment in trace.result["prompt"]["segments"]:
        if segment["kind"] == "chunk" and segment["status"] == "hit":
            hits[segment["start"] : segment["end"]] = True
    among = np.flatnonzero(hits).astype(np.int32)
    return overlaps(trace.deviations, check_layer, count, part, among)


def overlaps(
    deviations: Deviations,
    check_layer: int,
    count: int,
    part: str = "v",
    among: Ints | None = None,
) -> list[LayerOverlap]:
    """Every measured layer beside the measured layer `check_layer`, itself included.

    count: how many top tokens a layer's set has, ties going to the lower position; part: "k", "v"
    or "k+v"; among: positions that count, None for all. Raises ValueError for a layer that wasn't
    measured and for another part.
    """
    if check_layer not in deviations.layers:
        raise ValueError(f"layer {check_layer} was not measured")
    rows = values(deviations, part)
    if among is not None:
        rows = rows[:, np.isin(deviations.positions, among)]
    mine = rows[deviations.layers.index(check_layer)]
    return [
        LayerOverlap(layer, jaccard(top(row, count), top(mine, count)), spearman(row, mine))
        for layer, row in zip(deviations.layers, rows, strict=True)
    ]


def values(deviations: Deviations, part: str = "v") -> Floats:
    """Deviation of a part, "k", "v" or "k+v": float32 [M, n]."""
    parts = {"k": deviations.k, "v": deviations.v, "k+v": deviations.k + deviations.v}
    if part not in parts:
        raise ValueError(f"{part!r} is none of {', '.join(parts)}")
    return parts[part]


def top(scores: Floats, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` highest of [n], ties going to the lower index."""
    return np.argsort(-scores, kind="stable")[: max(0, count)]


def jaccard(one: npt.NDArray[np.intp], other: npt.NDArray[np.intp]) -> float:
    """What two sets have in common over what they have together; 1 for two empty ones."""
    union = len(np.union1d(one, other))
    return len(np.intersect1d(one, other)) / union if union else 1.0


def spearman(one: Floats, other: Floats) -> float | None:
    """Correlation of the ranks of [n] and [n], equal values sharing their mean rank; None where
    there is none: fewer than two values, or all of one side equal."""
    a, b = _centred(_ranks(one)), _centred(_ranks(other))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip((a @ b) / size, -1, 1)) if size else None


def _ranks(values: Floats) -> _Doubles:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: _Doubles = ends - (counts - 1) / 2
    return means[group]


def _centred(values: _Doubles) -> _Doubles:
    return values - values.mean() if len(values) else values
