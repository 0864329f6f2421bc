"""A map of layers and tokens made as small as a screen, its peaks kept."""

import numpy as np

from engine.trace.record import Floats


def pooled(values: Floats, columns: int, rows: int | None = None) -> Floats:
    """The largest value in each cell of a coarser map: float32 [M, n] -> [rows, columns].

    A side that is no longer than asked stays as it is. Cells differ by one value at most. NaN
    counts as nothing, unless a cell has nothing else. Raises ValueError for less than one row or
    column, and for a map that isn't [M, n].
    """
    if values.ndim != 2:
        raise ValueError(f"a map has two dimensions, not {values.ndim}")
    if columns < 1 or (rows is not None and rows < 1):
        raise ValueError("a map has at least one row and one column")
    high = _along(values, 1, columns)
    return high if rows is None else _along(high, 0, rows)


def edges(count: int, cells: int) -> list[int]:
    """Where the cells of `pooled` begin, and the end: of `count` values in so many cells at most,
    cell i holds those in [edges[i], edges[i + 1])."""
    cells = min(cells, count)
    return [i * count // cells for i in range(cells + 1)] if cells else [0]


def _along(values: Floats, axis: int, cells: int) -> Floats:
    if values.shape[axis] <= cells:
        return values.astype(np.float32)
    starts = np.array(edges(values.shape[axis], cells)[:-1])
    # fmax passes over NaN where there is anything else.
    return np.fmax.reduceat(values, starts, axis=axis).astype(np.float32)
