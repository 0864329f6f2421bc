"""A prompt while it is computed: its phases, and the waterfall of its layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cbcli.inspect.lines import EMPTY, Line, Span, line, span
from cbcli.inspect.run import ms
from cbcli.inspect.theme import Look
from cbcli.inspect.waterfall import (
    layer_line,
    legend_line,
    lines_of_phases,
    pieces,
    scale_line,
)
from cbcli.live.view import View
from cbcli.units import count_text
from engine.trace.record import Phase
from engine.trace.spans import spans_of

if TYPE_CHECKING:
    from engine.options import BlendOptions
    from engine.prompt import Prompt
    from engine.timing import Stopwatch

_NICE = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
LEAST_LAYERS = 3  # that are worth lines of their own


@dataclass(frozen=True)
class _Prefill:
    """One under way, or done after `seconds`."""

    tokens: int
    watch: Stopwatch
    began: float
    seconds: float | None = None


@dataclass(frozen=True)
class _Step:
    """A phase, in seconds of the clock; end None: it goes on."""

    name: str
    start: float
    end: float | None


class AskScene:
    """A `Scene`, and the engine's `Observer`. view: where it is shown; streams: whether the answer
    goes to the same terminal, so that the view ends where it begins. clock: as
    `time.perf_counter`, which the engine goes by."""

    def __init__(
        self, *, streams: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.view = View()
        self._streams, self._clock = streams, clock
        self._began = clock()
        self._steps: tuple[_Step, ...] = ()
        self._facts = ""
        self._prefill: _Prefill | None = None
        self._layers, self._way = 0, ""
        self._line = lru_cache(512)(layer_line)  # those of layers that are done stay as they are

    def about(self, layers: int, options: BlendOptions) -> None:
        """What is going to be done, by a model of so many layers."""
        self._layers, self._way = layers, way_of(options)

    # What is told, in the thread that goes through it.

    def phase(self, name: str) -> None:
        """What went on has ended, and this goes on; "": nothing."""
        now = self._clock()
        if self._steps and self._steps[-1].end is None:
            last = self._steps[-1]
            self._steps = (*self._steps[:-1], _Step(last.name, last.start, now))
            if last.name != "prefill":
                self.view.say(f"{last.name}: {ms(now - last.start)}")
        self._facts = ""
        if name == "decode" and self._streams:
            self.view.close()
        elif name:
            self._steps = (*self._steps, _Step(name, now, None))

    def prefill(self, prompt: Prompt, watch: Stopwatch, began: float) -> None:
        if self._prefill is None:
            self.phase("prefill")
        self._prefill = _Prefill(len(prompt.token_ids), watch, began)

    def prefilled(self, seconds: float) -> None:
        assert self._prefill is not None
        before = self._prefill
        self._prefill = _Prefill(before.tokens, before.watch, before.began, seconds)
        self.phase("")
        parts = ", ".join(f"{p.name} {ms(p.end_s - p.start_s)}" for p in _inside(self._prefill, 0))
        self.view.say(f"first token after {ms(seconds)}: {parts}")

    def told(self, label: str, facts: str) -> None:
        self._facts = f"{label}: {facts}"

    # What is shown, in another.

    def status(self) -> str:
        if not self._steps:
            return "beginning"
        now, step = self._clock(), self._steps[-1]
        facts = f", {self._facts}" if self._facts else ""
        if step.name == "prefill" and self._prefill is not None and step.end is None:
            facts = f", {self._far(self._prefill)}"
        return f"{step.name}{facts}: {ms((step.end or now) - step.start)}"

    def lines(self, columns: int, rows: int | None, look: Look) -> list[Line]:
        now, prefill = self._clock(), self._prefill
        shown = [self._title(now)]
        room = None if rows is None else rows - len(shown)
        phases = self.phases(now)
        below = [EMPTY, *lines_of_phases(phases, look, columns)] if phases else []
        if self._facts:
            below.append(line(span("  " + self._facts, "dim")))
        if prefill is None or not self._layers:
            return shown + (below[1:] if room is None else below[1:][-room:] if room > 0 else [])
        if room is not None and room < self._layers + 2 + len(below):
            below = [_short(phases)]
        layers = None if room is None else room - 2 - len(below)
        if layers is None or layers >= LEAST_LAYERS:
            shown += self._waterfall(prefill, now, columns, layers, look)
        return shown + below if rows is None else (shown + below)[:rows]

    def phases(self, now: float) -> list[Phase]:
        """What was done up to now, in seconds since the prefill's start."""
        zero = self._began if self._prefill is None else self._prefill.began
        found = []
        for step in self._steps:
            if step.name == "prefill" and self._prefill is not None:
                found += _inside(self._prefill, now)
            else:
                end = now if step.end is None else step.end
                found.append(Phase(step.name, step.start - zero, end - zero))
        return found

    def _title(self, now: float) -> Line:
        prefill = self._prefill
        way = f"{self._way}, " if self._way else ""
        if prefill is None:
            return line(span(f"{way}before the prefill: {ms(now - self._began)}", "bold"))
        tokens = count_text(prefill.tokens, "tokens")
        if prefill.seconds is None:
            took = ms(now - prefill.began)
            done = f"{self._far(prefill)}, {took}"
        else:
            done = f"first token after {ms(prefill.seconds)}"
        return line(span(f"{way}{tokens}: {done}", "bold"))

    def _far(self, prefill: _Prefill) -> str:
        """How many layers are through."""
        watch = prefill.watch
        passed = watch.starts or watch.reads
        done = self._layers if watch.logits else max(0, len(passed) - 1)
        read = " read" if watch.reads and not watch.starts else ""
        return f"{done} of {self._layers} layers{read}"

    def _waterfall(
        self, prefill: _Prefill, now: float, columns: int, most: int | None, look: Look
    ) -> list[Line]:
        """`most` of the layers, where the work is."""
        watch, running = prefill.watch, prefill.seconds is None
        spans = spans_of(watch, prefill.began, self._layers, now)
        ends = [piece.end for layer in spans for piece in pieces(layer)]
        if prefill.seconds is None:
            # It grows in steps, so that what was drawn stays where it is for a while.
            end = nice(max(now - prefill.began, *ends, 0.001))
        else:
            end = max(prefill.seconds, *ends)
        at = -1
        if running and not watch.logits:
            at = len(watch.starts or watch.reads) - 1
        first, last = 0, self._layers
        if most is not None and most < last:
            first = min(max(0, at - most + 2), last - most) if running else last - most
            last = first + most
        sums = {
            "load": watch.load.seconds,
            "stall": watch.stall.seconds,
            "rotate": watch.rotate.seconds,
            "score": watch.score.seconds,
            "recompute": watch.recompute.seconds,
        }
        return [
            legend_line(sums, look, columns),
            scale_line((0.0, end), look, columns),
            *(
                self._line(number, spans[number], (0.0, end), look, columns, cursor=number == at)
                for number in range(first, last)
            ),
        ]


def way_of(options: BlendOptions) -> str:
    """What is done, in a few words: `blend question 0.16`."""
    if options.mode != "blend":
        return "full prefill" if options.mode == "full" else options.mode
    if options.threshold is not None:
        much = f"threshold {float(options.threshold):g}"
    else:
        much = ",".join(f"{float(ratio):g}" for ratio in options.ratios)
    return f"blend {options.policy} {much}".rstrip()


def nice(seconds: float) -> float:
    """The next of few lengths of time that is no shorter."""
    unit = 10.0 ** math.floor(math.log10(seconds))
    return next(step * unit for step in _NICE if step * unit >= seconds * (1 - 1e-9))


def _inside(prefill: _Prefill, now: float) -> list[Phase]:
    """A prefill's phases as far as they have come, as a trace has them."""
    watch, began = prefill.watch, prefill.began
    until = now if prefill.seconds is None else began + prefill.seconds
    first = watch.starts.get(0, until)
    read = watch.reads.get(0, first)
    logits = watch.logits or until
    parts = (
        ("find", began, read),
        ("read question", read, first),
        ("layers", first, logits),
        ("logits", logits, until),
    )
    return [Phase(name, a - began, b - began) for name, a, b in parts if b > a]


def _short(phases: Sequence[Phase]) -> Line:
    """All phases in one line."""
    parts: list[Span] = []
    for phase in phases:
        parts += [span(f"{phase.name} "), span(f"{ms(phase.end_s - phase.start_s)}  ", "dim")]
    return tuple(parts)
