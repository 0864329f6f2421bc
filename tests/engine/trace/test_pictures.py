"""What a view is drawn from: coarser maps and overlaps, against examples worked out by hand."""

import numpy as np
import pytest

from engine.trace.heat import edges, pooled
from engine.trace.overlap import jaccard, overlaps, spearman, top, values
from engine.trace.record import Deviations


def floats(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def test_a_map_keeps_its_peaks() -> None:
    map_ = floats([1, 9, 2, 3, 0], [4, 0, 0, 0, 7], [5, 5, 5, 5, 5])
    # Of five columns two cells: columns 0-1 and 2-4. Of three rows two: row 0, rows 1-2.
    assert edges(5, 2) == [0, 2, 5]
    assert pooled(map_, 2).tolist() == [[9, 3], [4, 7], [5, 5]]
    assert pooled(map_, 2, 2).tolist() == [[9, 3], [5, 7]]
    assert pooled(map_, 1, 1).tolist() == [[9]]


def test_a_map_that_fits_stays() -> None:
    map_ = floats([1, 2], [3, 4])
    assert pooled(map_, 80, 24).tolist() == map_.tolist()
    assert pooled(np.zeros((3, 0), np.float32), 10).shape == (3, 0)
    assert edges(0, 5) == [0]
    with pytest.raises(ValueError, match="at least one"):
        pooled(map_, 0)
    with pytest.raises(ValueError, match="two dimensions"):
        pooled(map_[0], 2)


def test_what_is_no_number_hides_no_peak() -> None:
    made = pooled(floats([np.nan, 2, np.nan, np.nan]), 2)
    assert made[0, 0] == 2
    assert np.isnan(made[0, 1])


def test_top_takes_the_first_of_equal_ones() -> None:
    scores = floats([1, 3, 3, 0])[0]
    assert top(scores, 2).tolist() == [1, 2]
    assert top(scores, 1).tolist() == [1]
    assert top(scores, 0).tolist() == []


def test_jaccard_of_two_sets() -> None:
    assert jaccard(np.array([1, 2, 3]), np.array([2, 3, 4])) == 0.5
    assert jaccard(np.array([], int), np.array([], int)) == 1


def test_spearman_by_hand() -> None:
    # Ranks 1..5 and 2,1,4,3,5: sum of squared differences 4, so 1 - 6*4/(5*24) = 0.8.
    assert spearman(floats([1, 2, 3, 4, 5])[0], floats([20, 10, 40, 30, 50])[0]) == pytest.approx(
        0.8
    )
    # Ties share their mean rank: 1.5, 1.5, 3 beside 1, 2, 3 is sqrt(3)/2.
    assert spearman(floats([7, 7, 9])[0], floats([1, 2, 3])[0]) == pytest.approx(3**0.5 / 2)
    assert spearman(floats([1, 2, 3])[0], floats([3, 2, 1])[0]) == pytest.approx(-1)
    assert spearman(floats([4, 4, 4])[0], floats([1, 2, 3])[0]) is None
    assert spearman(floats([])[0], floats([])[0]) is None


def test_each_layer_beside_the_check_layer() -> None:
    measured = Deviations(
        (1, 5),
        np.array([10, 11, 12, 13], np.int32),
        floats([0, 0, 0, 1], [0, 0, 0, 1]),
        floats([4, 3, 2, 1], [4, 1, 3, 2]),
    )
    itself, later = overlaps(measured, 1, 2)
    assert (itself.layer, itself.jaccard, itself.spearman) == (1, 1, pytest.approx(1))
    # {10, 11} and {10, 12}: one of three. Ranks 4,3,2,1 and 4,1,3,2: 1 - 6*6/(4*15) = 0.4.
    assert (later.layer, later.jaccard) == (5, pytest.approx(1 / 3))
    assert later.spearman == pytest.approx(0.4)
    some = overlaps(measured, 1, 1, among=np.array([11, 12], np.int32))[1]
    assert (some.jaccard, some.spearman) == (0, pytest.approx(-1))
    assert values(measured, "k+v")[1].tolist() == [4, 1, 3, 3]
    with pytest.raises(ValueError, match="layer 3"):
        overlaps(measured, 3, 2)
    with pytest.raises(ValueError, match="'x'"):
        overlaps(measured, 1, 2, "x")


def test_ranks_and_top_sets_with_ties_are_those_of_plain_sorting() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 2, 7, 60):
        values = random.integers(0, 6, size).astype(np.float32)
        for count in (-1, 0, 1, 3, 59, 70):
            plain = np.argsort(-values, kind="stable")[: max(0, count)]
            assert top(values, count).tolist() == plain.tolist()
        other = random.integers(0, 6, size).astype(np.float32)
        ranks = [
            np.array([(v < x).sum() + ((v == x).sum() + 1) / 2 for x in v]) for v in (values, other)
        ]
        found = spearman(values, other)
        if found is not None:
            assert found == pytest.approx(np.corrcoef(*ranks)[0, 1])
