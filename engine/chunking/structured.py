"""Text with structure: cut between its blocks, and inside a block only where it is too large."""

from __future__ import annotations

import re
from collections.abc import Callable

from engine.chunking.graphemes import is_boundary
from engine.chunking.layout import Fits, Layout
from engine.chunking.outline import (
    CODE,
    DEFINITION,
    HEADING,
    NONE,
    PARAGRAPH,
    TABLE,
    Outline,
)
from engine.chunking.prose import LINE, SENTENCE, WORD, last_boundary, places
from engine.chunking.prose import PARAGRAPH as BLANK_LINE

_ROW = re.compile(r"\n+")
_NOT_SPACE = re.compile(r"\S")
_INDENT = re.compile(r"[ \t]*")
_TITLES_KEPT = 1000
_CLOSING = 300  # characters at a block's end


def _no_title(text: str, start: int, end: int) -> str:
    return ""


class Structured(Layout):
    """Text with its blocks. title: what the heading that is the block `[start, end)` says."""

    def __init__(
        self, text: str, outline: Outline, title: Callable[[str, int, int], str] = _no_title
    ) -> None:
        self._text = text
        self._outline = outline
        self._title = title
        self._titles: dict[int, str] = {}

    def bound(self, start: int, after: int, high: int, fits: Fits) -> int:
        outline = self._outline
        for number in outline.chain(high):
            begin = outline.begin[number]
            if outline.kind[number] == PARAGRAPH or not after < begin < high:
                continue
            if is_boundary(self._text, begin, start) and fits(begin, outline.end[number]):
                return begin
        return high

    def between_blocks(self, start: int, done: int, low: int, high: int) -> int | None:
        best: tuple[int, int] | None = None
        for rank, place in self._outline.cuts(low, high):
            better = (best is None or rank <= best[0]) and place > done
            if better and is_boundary(self._text, place, start):
                best = rank, place
        return best[1] if best else None

    def best_place(self, start: int, done: int, low: int, high: int, fits: Fits) -> int | None:
        number = self._outline.block_before(high)
        inside = self._inside(number, done, low, high, fits) if number != NONE else None
        if inside is None:
            inside = self._at_level(start, low, high)
        return last_boundary(self._text, start, done, high) if inside is None else inside

    def overlap_places(self, earliest: int, end: int) -> list[int]:
        found = [place for _, place in self._outline.cuts(earliest, end - 1)]
        number = self._outline.block_before(end)
        if number != NONE:
            inside = max(earliest, self._outline.start[number] + 1)
            if self._outline.kind[number] == PARAGRAPH:
                found += places(self._text, (SENTENCE, LINE), inside, end - 1)
            elif self._outline.kind[number] == TABLE:
                inside = max(inside, self._outline.heads[number])
                found += places(self._text, (_ROW,), inside, end - 1)
        return found

    def headings(self, start: int) -> tuple[tuple[str, ...], int]:
        if not len(self._outline.headings):
            return (), 0
        found = _NOT_SPACE.search(self._text, start)
        path = self._outline.path(found.start() if found else start)
        before = sum(self._outline.start[number] < start for number in path)
        return tuple(map(self._title_of, path)), before

    def table_head(self, start: int) -> str:
        number = self._outline.block_before(start + 1)
        if number == NONE or self._outline.kind[number] != TABLE:
            return ""
        head = self._outline.heads[number]
        return self._text[self._outline.start[number] : head] if head <= start else ""

    def _title_of(self, number: int) -> str:
        if number not in self._titles:
            if len(self._titles) > _TITLES_KEPT:
                self._titles.clear()
            place = self._outline.start[number], self._outline.end[number]
            self._titles[number] = self._title(self._text, *place)
        return self._titles[number]

    def _inside(self, number: int, done: int, low: int, high: int, fits: Fits) -> int | None:
        """The best place in `[low, high]` that is inside the block, by what it is."""
        kind, begin = self._outline.kind[number], self._outline.start[number]
        if kind == TABLE:
            return self._row(number, done, low, high, fits)
        low = max(low, begin + 1)
        if kind in (CODE, DEFINITION):
            last = self._last_line(number) if kind == CODE else high
            for level in (BLANK_LINE, LINE):
                found = [p for p in places(self._text, (level,), low, high) if p != last]
                if found:  # before the line that is indented least, the last of them
                    return min(reversed(found), key=self._indent)
        elif kind != HEADING:
            for level in (SENTENCE, LINE):
                for place in reversed(places(self._text, (level,), low, high)):
                    if is_boundary(self._text, place, begin):
                        return place
        return None

    def _row(self, number: int, done: int, low: int, high: int, fits: Fits) -> int | None:
        """Where a row begins: the last one in `[low, high]`, or before if it fits a chunk."""
        least = max(self._outline.heads[number], done) + 1
        place = self._text.rfind("\n", least - 1, high) + 1
        if place >= max(low, least):
            return place
        end = self._text.find("\n", high)
        end = self._outline.end[number] if end < 0 else min(end + 1, self._outline.end[number])
        return place if place >= least and fits(place, end) else None

    def _last_line(self, number: int) -> int:
        """Where the block's last line begins, which closes it; not of one that ends in many blank
        lines."""
        begin, end = self._outline.start[number], self._outline.end[number]
        near = max(begin, end - _CLOSING)
        return near + self._text[near:end].rstrip().rfind("\n") + 1

    def _at_level(self, start: int, low: int, high: int) -> int | None:
        for place in reversed(places(self._text, (WORD,), low, high)):
            if is_boundary(self._text, place, start):
                return place
        return None

    def _indent(self, place: int) -> int:
        found = _INDENT.match(self._text, place)
        return found.end() - place if found else 0
