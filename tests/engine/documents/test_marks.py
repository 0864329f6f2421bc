"""Many marks in little memory are a sequence as any other."""

import copy
import tracemalloc

from engine.documents.document import Mark
from engine.documents.marks import Marks


def test_marks_are_a_sequence() -> None:
    places = [(0, 1), (7, 2), (9, 5)]
    marks = Marks("row", places)
    plain = tuple(Mark(start, "row", number) for start, number in places)
    assert marks == plain
    assert marks == Marks("row", places)
    assert marks != Marks("line", places)
    assert marks != plain[:2]
    assert marks[-1] == plain[-1]
    assert list(marks[1:]) == list(plain[1:])
    assert hash(marks) == hash(plain)
    assert not Marks("row", [])
    assert copy.deepcopy(marks) == plain


def test_a_million_rows_take_a_few_megabytes() -> None:
    tracemalloc.start()
    marks = Marks("row", ((n, n) for n in range(200_000)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(marks) == 200_000
    assert most < 40 * len(marks)
