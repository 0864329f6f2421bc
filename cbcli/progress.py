"""How far a piece of work is, with its rate and the time it will still take.

On a terminal a bar; elsewhere a plain line now and then, so that a log stays short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from cbcli.units import count_text, duration_text, rate_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PLAIN_INTERVAL = 10.0  # seconds between two plain lines


class Progress:
    """Progress of one piece of work.

        with out.progress("reading", unit="tokens", total=5000) as progress:
            progress.update(120)

    `update` takes the amount done so far, not a step. Rates count from the first update on, so
    what an earlier run had done already doesn't flatter them. `clock` returns seconds.
    `tell`: given label and facts to show elsewhere, instead of here.
    """

    def __init__(
        self,
        label: str,
        *,
        unit: str,
        total: int | None,
        stream: TextIO,
        bar: bool,
        silent: bool,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str, str], None] | None = None,
    ) -> None:
        self._label = label
        self._unit = unit
        self._total = total
        self._stream = stream
        self._silent = silent
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._last_line = clock()
        self._tell = tell
        self._wants_bar = bar and not silent and tell is None
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._wants_bar = False

    def update(self, done: int, *, total: int | None = None, label: str | None = None) -> None:
        """`done` of `total` is done now. A new `total` or `label` stays until changed again."""
        now = self._clock()
        self._first = self._first or (now, done)
        self._total = self._total if total is None else total
        self._label = self._label if label is None else label
        if self._wants_bar and self._bar is None:
            self._start_bar()  # not before there is something to show
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=done,
                total=self._total,
                description=self._label,
                facts=self.facts(done, now),
            )
        elif self._tell is not None:
            self._tell(self._label, self.facts(done, now))
        elif not self._silent and now - self._last_line >= PLAIN_INTERVAL:
            self._last_line = now
            self._stream.write(f"{self._label}: {self.facts(done, now)}\n")
            self._stream.flush()

    def above(self, text: str) -> bool:
        """Write a line, which may hold colours, above the bar; False where no bar is shown."""
        if self._bar is None:
            return False
        from rich.text import Text

        self._bar.console.print(Text.from_ansi(text), soft_wrap=True)
        return True

    def restart(self, label: str) -> None:
        """The next stage of the same work: another label, and rates counted anew."""
        self._label, self._first, self._total = label, None, None

    def facts(self, done: int, now: float) -> str:
        """ "1,200 of 5,000 tokens (24%), 310 tokens/s, 12.3 s left", as far as it is known."""
        if self._total:
            amount = count_text(done, "bytes") if self._unit == "bytes" else f"{done:,}"
            whole = count_text(self._total, self._unit)
            parts = [f"{amount} of {whole} ({100 * done // self._total}%)"]
        else:
            parts = [count_text(done, self._unit)]
        start, before = self._first or (now, done)
        if now - start > 0.5 and done > before:
            rate = (done - before) / (now - start)
            parts.append(rate_text(rate, self._unit))
            if self._total and done < self._total:
                parts.append(f"{duration_text((self._total - done) / rate)} left")
        return ", ".join(parts)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=self._stream, highlight=False, markup=False, emoji=False)
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total, facts="")
        self._bar.start()
