"""The Compare view: two runs, or one beside full prefill."""

from __future__ import annotations

from itertools import zip_longest
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.lines import EMPTY, Line, Span, fit, line, span
from cbcli.inspect.run import Run
from cbcli.inspect.theme import Look
from cbcli.inspect.versus import (
    answer_lines,
    differing,
    fact_lines,
    first_difference,
    kl_lines,
    selection_lines,
)
from cbcli.inspect.view import View


def compare_lines(one: Run, other: Run | None, look: Look, columns: int) -> list[Line]:
    """Everything the view shows. other: None compares with full prefill's answer."""
    mine = one.trace.answer
    theirs = one.trace.reference if other is None else other.trace.answer
    names = ("A: this run", "full prefill") if other is None else ("A", "B")
    shown = [line(span("Runs", "title")), *fact_lines(one, other, columns), EMPTY]
    at = first_difference(mine, theirs)
    if theirs:
        said = "the same answer" if at is None else f"they part at token {at}"
        shown.append(
            line(span("Answers", "title"), span("  " + said, "good" if at is None else "bad"))
        )
        marks = differing(mine, theirs)
        room = (columns - 3) // 2
        left_side = answer_lines(mine, marks[0], room, look)
        right_side = answer_lines(theirs, marks[1], room, look)
        bar = " | " if look.ascii else " │ "
        heads = [(span(names[0], "one"),), (span(names[1], "other"),)]
        pairs = [heads, *zip_longest(left_side, right_side, fillvalue=EMPTY)]
        shown += [(*fit(a, room), Span(bar, "dim"), *fit(b, room)) for a, b in pairs]
    else:
        shown.append(line(span("Answer", "title")))
        shown += answer_lines(mine, [False] * len(mine), columns, look)
        shown.append(
            line(
                span(
                    "one run, and no full prefill to compare it with: record runs with "
                    "--compare, or open two",
                    "dim",
                )
            )
        )
    shown += [
        EMPTY,
        line(
            span("KL from full prefill", "title"),
            span("  nats, at each token of its answer", "dim"),
        ),
    ]
    shown += kl_lines(one, other, look, columns)
    if other is not None:
        shown += [EMPTY, line(span("Recomputed tokens", "title"))]
        shown += selection_lines(one, other, columns)
    return shown


class CompareCanvas(Canvas):
    def __init__(self) -> None:
        super().__init__(id="compare")
        self.pair: tuple[Run, Run | None] | None = None

    def draw(self) -> None:
        if self.pair is not None and self.columns > 20:
            self.show(compare_lines(*self.pair, self.view.look, self.columns - 1))

    def on_resize(self) -> None:
        self.draw()


class CompareView(View):
    help_text = (
        "Two runs beside each other: A is the run the other views show, B the next one; `b` takes "
        "another as B, `x` swaps them. What differs in the answers is underlined. KL is KL(full || "
        "run) in nats along full prefill's answer, where runs were recorded with --compare. Tokens "
        "recomputed in one run alone are listed, by chunk and offset, so that another order of "
        "chunks doesn't matter. A single run is compared with full prefill."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "other", "Other run", id="compare.other", tooltip="Take another run as B"),
        Binding("x", "swap", "Swap", id="compare.swap", tooltip="Swap A and B"),
    ]

    def __init__(self) -> None:
        super().__init__(id="view-compare")
        self.step = 1

    def compose(self) -> ComposeResult:
        yield CompareCanvas()

    def present(self, run: Run) -> None:
        runs = self.view.runs
        at = runs.index(run)
        other = runs[(at + self.step) % len(runs)] if len(runs) > 1 else None
        canvas = self.query_one(CompareCanvas)
        canvas.pair = (run, other)
        canvas.draw()

    def repaint(self) -> None:
        self.query_one(CompareCanvas).draw()

    def action_other(self) -> None:
        count = len(self.view.runs)
        if count < 2:
            self.notify("there is no other run; open two traces", severity="warning")
            return
        self.step = self.step % (count - 1) + 1
        self.present(self.view.shown_run)

    def action_swap(self) -> None:
        count = len(self.view.runs)
        if count > 1:
            at = (self.view.current + self.step) % count
            self.step = count - self.step
            self.view.current = at
