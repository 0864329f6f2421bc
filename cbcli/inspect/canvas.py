"""Widgets that draw lines of spans, one when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from cbcli.inspect.lines import EMPTY, Line, fit, in_ascii
from cbcli.inspect.theme import Look, style_of

if TYPE_CHECKING:
    from cbcli.inspect.app import InspectApp


def strip_of(shown: Line, width: int, base: Style, look: Look) -> Strip:
    """A line as Textual draws it: `width` cells exactly."""
    parts = [
        Segment(in_ascii(part.text) if look.ascii else part.text, base + style_of(part.role, look))
        for part in fit(shown, width)
        if part.text
    ]
    return Strip(parts, width)


class Canvas(ScrollView, can_focus=True):
    """Lines, scrolled. `show` sets them; a subclass may make them when drawn instead."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Canvas { scrollbar-gutter: stable; scrollbar-size-vertical: 1; overflow-x: hidden;
             background: $background; }
    """

    lines: Sequence[Line] = ()
    _base: Style | None = None

    @property
    def view(self) -> InspectApp:
        return cast("InspectApp", self.app)

    @property
    def columns(self) -> int:
        """Cells of a line."""
        return max(1, self.scrollable_content_region.width)

    def show(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.virtual_size = Size(self.columns, len(lines))
        self.refresh()

    def line_at(self, number: int) -> Line:
        return self.lines[number] if 0 <= number < len(self.lines) else EMPTY

    def render_lines(self, crop: Region) -> list[Strip]:
        self._base = self.rich_style  # worked out once for all lines
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        shown = self.line_at(y + self.scroll_offset.y)
        return strip_of(shown, self.size.width, self._base or self.rich_style, self.view.look)

    def redraw(self, numbers: Sequence[int] | range) -> None:
        """Draws some lines anew, where they are on the screen."""
        top, height = self.scroll_offset.y, self.size.height
        for number in _bounded(numbers, top, top + height):
            self.refresh(Region(0, number - top, self.size.width, 1))

    def keep_in_sight(self, number: int) -> None:
        """Scrolls so that a line is shown: as little as needed, with two lines around it, where it
        is near; where it is far, with a third of the screen before it."""
        top, height = self.scroll_offset.y, max(1, self.size.height)
        if not top - 2 <= number <= top + height + 1:
            self.scroll_to(y=max(0, number - height // 3), animate=False, force=True)
            return
        around = 2
        around = min(around, max(0, (height - 1) // 2))
        if number < top + around:
            self.scroll_to(y=max(0, number - around), animate=False, force=True)
        elif number >= top + height - around:
            self.scroll_to(y=number - height + around + 1, animate=False, force=True)


def _bounded(numbers: Sequence[int] | range, low: int, high: int) -> Iterator[int]:
    return (number for number in numbers if low <= number < high)
