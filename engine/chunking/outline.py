"""The blocks of a text: paragraphs, headings, list items, code and tables, one inside another."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

PARAGRAPH, HEADING, CODE, TABLE, ITEM, QUOTE, DEFINITION = range(7)
"""Kinds of block. All but paragraphs stay whole where they fit a chunk."""

TOP = 8
"""Rank of a block that is in no other. The lower a block's rank, the rather is cut before it:
headings have their level, 1 to 6; what is inside others has 2 more a level, a following item 1."""

NONE = -1
_AT_ONCE = 16  # headings that follow one another with nothing between


class Outline:
    """Blocks in the order they begin in, outer ones before inner ones; each ends where the next
    one that is not inside it begins. A cut is made only where a block begins, or inside one.

    start, end, parent, rank, kind: of each block; parent: its number, or NONE.
    begin: where the headings directly before a block begin, else its start: nothing is cut
    between headings and what follows them.

    Some thirty bytes a block, whatever it holds.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.start, self.end, self.begin = array("q"), array("q"), array("q")
        self.parent, self.rank, self.kind = array("q"), array("B"), array("B")
        self.heads: dict[int, int] = {}
        """Of a table, where its first row after the header begins."""
        self.headings, self.above = array("q"), array("q")
        """Numbers of the headings that others stand under; for each its place in this list of the
        one that it stands under itself, or NONE."""
        self._open: list[int] = []

    def add(self, start: int, kind: int, parent: int, rank: int) -> int:
        """The next block's number. It ends the blocks before it that it is not inside of."""
        previous = NONE
        while self._open and self._open[-1] != parent:
            previous = self._open.pop()
            self.end[previous] = start
        if parent != NONE and start == self.start[parent]:
            begin = self.begin[parent]
        elif previous != NONE and self.kind[previous] == HEADING:
            begin = self.begin[previous]
        else:
            begin = start
        number = len(self.start)
        for values, value in (
            (self.start, start),
            (self.end, self._length),
            (self.begin, begin),
            (self.parent, parent),
            (self.rank, rank),
            (self.kind, kind),
        ):
            values.append(value)
        self._open.append(number)
        return number

    def add_heading(self, number: int) -> None:
        """Block `number` is a heading that what follows stands under, its rank its level."""
        above = len(self.headings) - 1
        while above != NONE and self.rank[self.headings[above]] >= self.rank[number]:
            above = self.above[above]
        self.headings.append(number)
        self.above.append(above)

    def last_in(self, parent: int) -> int:
        """Kind of the last block so far that is directly in `parent`; NONE where there is none."""
        for number in reversed(self._open):
            if self.parent[number] == parent:
                return self.kind[number]
        return NONE

    def block_before(self, place: int) -> int:
        """The innermost block that `place - 1` is in; NONE before the first."""
        return bisect_left(self.start, place) - 1

    def chain(self, place: int) -> list[int]:
        """The blocks that a cut before `place` would cut, the outermost first."""
        found: list[int] = []
        number = self.block_before(place)
        while number != NONE:
            if place < self.end[number]:
                found.append(number)
            number = self.parent[number]
        return found[::-1]

    def cuts(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Rank and place of each block in `[low, high]` that may be cut off from what is before
        it."""
        for number in range(bisect_left(self.start, low), bisect_right(self.start, high)):
            if self.begin[number] == self.start[number]:
                yield self.rank[number], self.start[number]

    def path(self, place: int) -> list[int]:
        """The headings' block numbers that what is at `place` stands under, the outermost first;
        those that begin there included, with those that follow at once."""
        index = self._heading_at(place)
        for following in self.headings[index + 1 : index + 1 + _AT_ONCE]:
            if self.begin[following] > place:
                break
            index += 1
        found: list[int] = []
        while index != NONE:
            found.append(self.headings[index])
            index = self.above[index]
        return found[::-1]

    def _heading_at(self, place: int) -> int:
        """Index of the last heading that begins at or before `place`."""
        low, high = 0, len(self.headings)
        while low < high:
            middle = (low + high) // 2
            if self.start[self.headings[middle]] <= place:
                low = middle + 1
            else:
                high = middle
        return low - 1
