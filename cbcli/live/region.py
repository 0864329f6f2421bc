"""The lines at the bottom of a terminal, drawn anew while something goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from cbcli.inspect.lines import Line, fit, in_ascii, width_of
from cbcli.inspect.theme import Look, style_of
from cbcli.live.view import Scene, Ticker, View

INTERVAL = 0.1  # seconds between two pictures, which take computing a millisecond or two each


class Region(View):
    """Draws a scene, in a thread of its own, until it is closed; nothing else may write to the
    terminal meanwhile but `above`. Text is never markup."""

    def __init__(
        self, scene: Scene, stream: TextIO, look: Look, *, interval: float = INTERVAL
    ) -> None:
        self._scene, self._look = scene, look
        self._console = Console(
            file=stream,
            highlight=False,
            markup=False,
            emoji=False,
            no_color=not look.color,
        )
        self._picture = _Picture((), look)
        self._width = 0  # of the terminal, when it was drawn
        self._lock = threading.Lock()
        self._open = False
        self._ticker = Ticker(self._draw, interval)
        self._live = Live(
            console=self._console,
            get_renderable=lambda: self._picture,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def begin(self) -> None:
        self._open = True
        self._live.start()
        self._ticker.start()

    def above(self, text: str) -> bool:
        with self._lock:
            if self._open:
                self._console.print(Text.from_ansi(text), soft_wrap=True)
            return self._open

    def close(self, *, keep: bool = True) -> None:
        if not self._open:
            return
        try:
            self._ticker.stop()
        finally:  # the cursor comes back, whatever happens meanwhile
            with self._lock:
                self._open = False
                if keep:
                    self._show(None)
                self._live.transient = not keep
                self._live.stop()

    def _draw(self) -> None:
        with self._lock:
            if self._open and self._show(self._console.size.height - 1):
                self._live.refresh()

    def _show(self, rows: int | None) -> bool:
        """Looks at the scene; whether there is something else to draw."""
        width = self._console.size.width
        columns = max(1, width - 1)  # terminals differ in what they do at the last cell
        shown = self._scene.lines(columns, None if rows is None else max(1, rows), self._look)
        picture = _Picture(
            tuple(one if width_of(one) <= columns else fit(one, columns) for one in shown),
            self._look,
        )
        if picture.lines == self._picture.lines and width == self._width:
            return False
        if width < self._width:
            self._rewrapped(width)
        self._picture, self._width = picture, width
        return True

    def _rewrapped(self, width: int) -> None:
        """A terminal that became narrower has broken lines, so more of them are to be drawn over
        than there were."""
        sizes = [width_of(one) for one in self._picture.lines]
        more = sum((size - 1) // width for size in sizes if size)
        if more:
            step = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            self._console.control(Control(*(step * more)))


class _Picture:
    """Lines as Rich draws them: already as wide as they may be, and nothing in them to parse."""

    def __init__(self, lines: Sequence[Line], look: Look) -> None:
        self.lines, self._look = tuple(lines), look

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        look = self._look
        for number, one in enumerate(self.lines):
            if number:
                yield Segment.line()
            for part in one:
                text = in_ascii(part.text) if look.ascii else part.text
                yield Segment(text, style_of(part.role, look))
