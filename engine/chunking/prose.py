"""Plain text: cut at paragraphs, else sentences, lines, words, else between characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.chunking.graphemes import is_boundary
from engine.chunking.layout import Fits, Layout

_CLOSERS = "\"'”’»)\\]}）」』】》〉"
# A blank line; the next paragraph keeps its indentation.
PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")
# The look-behinds keep these linear on long runs of dots or spaces.
SENTENCE = re.compile(
    rf"(?<=[.!?…])[{_CLOSERS}]{{0,3}}\s+"
    rf"|(?<=[。！？｡．])[{_CLOSERS}]{{0,3}}(?![。！？｡．{_CLOSERS}])\s*"
)
LINE = re.compile(r"[\n\r\x0b\x0c\x85\u2028\u2029]+")
WORD = re.compile(r"\s+|(?<=[、，；：])")

_BEFORE = 16  # characters before a range in which a match that ends in it may begin


def places(text: str, levels: Sequence[re.Pattern[str]], low: int, high: int) -> list[int]:
    """Ends of the levels' matches within `[low, high]`, ascending."""
    found = {
        match.end()
        for level in levels
        for match in level.finditer(text, max(0, low - _BEFORE), high)
    }
    return sorted(place for place in found if low <= place <= high)


def last_boundary(text: str, start: int, done: int, high: int) -> int | None:
    """The last place in `(done, high]` between what a reader sees as characters."""
    for place in range(high, done, -1):
        if is_boundary(text, place, start):
            return place
    return None


class Prose(Layout):
    """Text without structure but blank lines and what looks like a heading in Markdown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def best_place(self, start: int, done: int, low: int, high: int, fits: Fits) -> int | None:
        for level in (PARAGRAPH, SENTENCE, LINE, WORD):
            for place in reversed(places(self._text, (level,), low, high)):
                if level is PARAGRAPH and self._under_heading(place, start):
                    continue
                if is_boundary(self._text, place, start):
                    return place
        return last_boundary(self._text, start, done, high)

    def overlap_places(self, earliest: int, end: int) -> list[int]:
        found = places(self._text, (PARAGRAPH, SENTENCE, LINE), earliest, end - 1)
        return found + places(self._text, (WORD,), earliest, end - 1)

    def _under_heading(self, place: int, start: int) -> bool:
        """Whether the paragraph that ends at `place` is a Markdown heading, which belongs to
        what follows it."""
        end = start + len(self._text[start:place].rstrip())
        line = max(start, self._text.rfind("\n", start, end) + 1)
        return self._text.startswith("#", line)
