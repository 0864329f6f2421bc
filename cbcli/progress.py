"""How far a piece of work is, with its rate and the time it will still take.

On a terminal a bar, or a plain line now and then, so that a log stays short.
"""

from __future__ import annotations

import json as json_module
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
    `bar`: as a bar; else with `lines` a line every ten seconds, which with `json` is JSON.
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
        lines: bool = True,
        json: bool = False,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str, str], None] | None = None,
    ) -> None:
        self._label = label
        self._unit = unit
        self._total = total
        self._stream = stream
        self._lines = lines and not silent
        self._json = json
        self._moves = 0  # since rates are counted
        self._done: int | None = None
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
        if label is not None and label != self._label:  # another stage: it has a rate of its own
            self._label, self._first = label, None
        if self._first is None:
            self._first, self._moves, self._done = (now, done), 0, done
        if done != self._done:
            self._moves, self._done = self._moves + 1, done
        self._total = self._total if total is None else total
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
        elif self._lines and now - self._last_line >= PLAIN_INTERVAL:
            self._last_line = now
            text = f"{self._label}: {self.facts(done, now)}"
            self._stream.write(f"{self._record(done, now) if self._json else text}\n")
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
        rate = self._rate(done, now)
        if rate is not None:
            parts.append(rate_text(rate, self._unit))
        left = self._left(done, now)
        if left is not None:
            parts.append(f"{duration_text(left)} left")
        return ", ".join(parts)

    def _record(self, done: int, now: float) -> str:
        """The same as a line of JSON."""
        facts = {
            "label": self._label,
            "done": done,
            "total": self._total,
            "unit": self._unit,
            "rate": self._rate(done, now),
            "left_s": self._left(done, now),
        }
        return json_module.dumps({"progress": facts})

    def _rate(self, done: int, now: float) -> float | None:
        """A second; None where it isn't known yet."""
        start, before = self._first or (now, done)
        return (done - before) / (now - start) if now - start > 0.5 and done > before else None

    def _left(self, done: int, now: float) -> float | None:
        """Seconds; None where they aren't known, as after a first step alone, which may have waited
        for something."""
        rate = self._rate(done, now)
        if rate is None or self._moves < 2 or not self._total or done >= self._total:
            return None
        return (self._total - done) / rate

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
