"""Where a text may be cut: what a cutter asks of its structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

Fits = Callable[[int, int], bool]
"""Whether a run of the text, alone and with what is repeated in front of it, fits a chunk."""


class Layout(ABC):
    """The structure of one text. Places are characters; a cut is made before one."""

    def bound(self, start: int, after: int, high: int, fits: Fits) -> int:
        """The last place in `(after, high]` at which nothing is cut that would fit a chunk whole,
        of those that stay whole if they can; `high` where there is none. `start`: of the chunk."""
        return high

    def between_blocks(self, start: int, done: int, low: int, high: int) -> int | None:
        """The best place in `[low, high]` after `done` that cuts no block; None where none is."""
        return None

    @abstractmethod
    def best_place(self, start: int, done: int, low: int, high: int, fits: Fits) -> int | None:
        """The best place in `[low, high]` to end the chunk from `start`, if a block must be cut,
        else the last one after `done`; None where a reader sees one character from there to
        `high`."""

    @abstractmethod
    def overlap_places(self, earliest: int, end: int) -> list[int]:
        """Places in `[earliest, end)` where the chunk behind one that ends at `end` may begin, to
        repeat what is from there on: the best kinds first, of each the first places."""

    def headings(self, start: int) -> tuple[tuple[str, ...], int]:
        """Headings that a chunk from `start` stands under, those it begins with included; and how
        many of them stand before it."""
        return (), 0

    def table_head(self, start: int) -> str:
        """Lines to repeat in front of a chunk from `start`, which is inside a table."""
        return ""
