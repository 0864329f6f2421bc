"""Where in a text its pages, rows and the like begin; of a table of a million rows, too."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from engine.documents.document import Mark


class Marks(Sequence[Mark]):
    """Many marks of one unit, in 16 bytes each; equal to any sequence of the same marks.

    places: start and number of each, ascending by start.
    """

    __slots__ = ("_numbers", "_starts", "_unit")

    def __init__(self, unit: str, places: Iterable[tuple[int, int]]) -> None:
        self._unit = unit
        self._starts = array("q")
        self._numbers = array("q")
        for start, number in places:
            self._starts.append(start)
            self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Mark: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mark]: ...
    def __getitem__(self, index: int | slice) -> Mark | Sequence[Mark]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return Mark(self._starts[index], self._unit, self._numbers[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Marks({self._unit!r}, {len(self)} places)"
