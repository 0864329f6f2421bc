"""The Time view: the waterfall of layers, the phases, and what the run is compared with."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.lines import EMPTY, Line, line, span, width_of
from cbcli.inspect.run import Run, ms
from cbcli.inspect.view import View
from cbcli.inspect.waterfall import (
    WORDS,
    part_legend,
    phase_lines,
    pieces,
    waterfall_lines,
    way_lines,
)


class TimeCanvas(Canvas):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "layer(1)", "Next layer", show=False, id="time.down"),
        Binding("up", "layer(-1)", "Layer before", show=False, id="time.up"),
        Binding("pagedown,space", "layer(10)", "Ten layers on", show=False, id="time.page_down"),
        Binding("pageup", "layer(-10)", "Ten layers back", show=False, id="time.page_up"),
        Binding("home", "layer(-100000)", "First layer", show=False, id="time.home"),
        Binding("end", "layer(100000)", "Last layer", show=False, id="time.end"),
    ]
    at = reactive(0)

    def __init__(self) -> None:
        super().__init__(id="waterfall")
        self.run: Run | None = None
        self.first = 0  # the line of layer 0

    def set_run(self, run: Run) -> None:
        self.run = run
        self.at = min(self.at, max(0, len(run.trace.spans) - 1))
        self.draw()

    def draw(self) -> None:
        if self.run is None or self.columns < 20:
            return
        run, look, columns = self.run, self.view.look, self.columns - 1
        shown = [line(span("Time to first token", "title")), *way_lines(run, look, columns), EMPTY]
        shown += [line(span("Layers", "title")), part_legend(run, look, columns), self.told()]
        layers = waterfall_lines(run, look, columns, self.at if run.trace.spans else None)
        self.first = len(shown) + 1
        shown += layers
        phases = phase_lines(run, look, columns)
        if phases:
            shown += [EMPTY, line(span("The whole run", "title")), *phases]
        self.show(shown)

    def told(self) -> Line:
        """The cursor's layer in numbers."""
        assert self.run is not None
        spans = self.run.trace.spans
        if not spans:
            return EMPTY
        found = pieces(spans[self.at])

        def told(at: bool) -> Line:
            parts = [span(f"layer {self.at}: ", "bold")]
            for piece in found:
                start = f" at {ms(piece.start)}" if at else ""
                words = f"{WORDS[piece.part]} {ms(piece.end - piece.start)}{start}  "
                parts.append(span(words, piece.part))
            return line(*parts)

        full = told(True)
        return full if width_of(full) <= self.columns else told(False)

    def watch_at(self) -> None:
        self.draw()
        self.keep_in_sight(self.first + self.at)

    def on_resize(self) -> None:
        self.draw()

    def action_layer(self, step: int) -> None:
        if self.run is not None and self.run.trace.spans:
            self.at = max(0, min(self.at + step, len(self.run.trace.spans) - 1))

    def on_click(self, event: events.Click) -> None:
        layer = event.y + self.scroll_offset.y - self.first
        if self.run is not None and 0 <= layer < len(self.run.trace.spans):
            self.at = layer


class TimeView(View):
    help_text = (
        "The time to first token beside full prefill's, reuse's and the bound: the least share of "
        "full prefill's time by counting operations. Below, each layer along the time: loading its "
        "stored KV (in whichever thread, so it may overlap other layers), waiting for it, placing "
        "it in the KV cache, scoring (or the question reading), and computing tokens. "
        "Loading is drawn only where nothing else happens at the same time; the line of the "
        "cursor's layer has all figures. Last, the phases of the whole run."
    )

    def compose(self) -> ComposeResult:
        yield TimeCanvas()

    def present(self, run: Run) -> None:
        self.query_one(TimeCanvas).set_run(run)

    def repaint(self) -> None:
        self.query_one(TimeCanvas).draw()
