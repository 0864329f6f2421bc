"""Where in a file a chunk stands: on which pages, in which rows, cells or chapters."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from cache_store.catalog import Place
from engine.documents.document import Mark


class Places:
    """The places of runs of one text. marks: ascending; see `Mark`."""

    def __init__(self, text: str, marks: Sequence[Mark], form: str = "text") -> None:
        self._text = text
        self._marks = marks
        self._starts = [mark.start for mark in marks]

    def place(self, start: int, end: int) -> Place | None:
        """From the mark that what is not blank in `[start, end)` begins under, to the last one of
        that unit before its end; None where no mark is."""
        if not self._marks:
            return None
        body = self._text[start:end]
        start += len(body) - len(body.lstrip())
        end -= len(body) - len(body.rstrip())
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, max(end, start + 1)) - 1
        if last < 0:
            return None
        begin = self._marks[max(first, 0)]
        number = begin.number
        for mark in self._marks[max(first, 0) : last + 1]:
            if mark.unit == begin.unit:
                number = mark.number
        return Place(begin.unit, min(begin.number, number), max(begin.number, number))
