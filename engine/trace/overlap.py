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
    best, ranks = top(mine, count), _centred(_ranks(mine))
    return [
        LayerOverlap(
            layer, jaccard(top(row, count), best), _correlation(_centred(_ranks(row)), ranks)
        )
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
    if 0 < count < len(scores):  # those alone are sorted that may be among them
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        among = np.flatnonzero(scores >= least)
        return among[np.argsort(-scores[among], kind="stable")[:count]]
    return np.argsort(-scores, kind="stable")[: max(0, count)]


def jaccard(one: npt.NDArray[np.intp], other: npt.NDArray[np.intp]) -> float:
    """What two sets have in common over what they have together; 1 for two empty ones."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    union = len(one) + len(other) - both
    return both / union if union else 1.0


def spearman(one: Floats, other: Floats) -> float | None:
    """Correlation of the ranks of [n] and [n], equal values sharing their mean rank; None where
    there is none: fewer than two values, or all of one side equal."""
    return _correlation(_centred(_ranks(one)), _centred(_ranks(other)))


def _correlation(a: _Doubles, b: _Doubles) -> float | None:
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip((a @ b) / size, -1, 1)) if size else None


def _ranks(values: Floats) -> _Doubles:
    order = np.argsort(values)  # which of equal ones is first doesn't matter: they get one rank
    ahead = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ahead[1:] != ahead[:-1]]))[: len(values)]
    ends = np.append(starts[1:], len(values))[: len(starts)]
    ranks: _Doubles = np.empty(len(values))
    ranks[order] = np.repeat((starts + 1 + ends) / 2, ends - starts)
    return ranks


def _centred(values: _Doubles) -> _Doubles:
    return values - values.mean() if len(values) else values
