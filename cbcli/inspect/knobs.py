"""The Knobs view: what to run next, and the runs of this session."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive
from textual.widgets import Input, Static

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.lines import line, span
from cbcli.inspect.run import Run
from cbcli.inspect.view import View
from cbcli.inspect.wishes import KNOBS, Place, history_lines, knob_lines, moved, places, turned


class KnobList(Canvas):
    """The knobs and the chunks, with a cursor on one of them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("g", "app.start_run", "Run", id="knobs.run", tooltip="Run it with these knobs"),
        Binding(
            "enter",
            "edit",
            "Question",
            key_display="enter",
            id="knobs.edit",
            tooltip="Write another question",
        ),
        Binding("x", "app.cancel_run", "Cancel", id="knobs.cancel", tooltip="Wait no longer"),
        Binding("up", "place(-1)", "The knob above", show=False, id="knobs.up"),
        Binding("down", "place(1)", "The knob below", show=False, id="knobs.down"),
        Binding("left", "turn(-1)", "Less", show=False, id="knobs.less"),
        Binding("right", "turn(1)", "More", show=False, id="knobs.more"),
        Binding("shift+left,pagedown", "turn(-10)", "Much less", show=False, id="knobs.much_less"),
        Binding("shift+right,pageup", "turn(10)", "Much more", show=False, id="knobs.much_more"),
        Binding("K,ctrl+up", "shift(-1)", "Move the chunk up", show=False, id="knobs.shift_up"),
        Binding(
            "J,ctrl+down", "shift(1)", "Move the chunk down", show=False, id="knobs.shift_down"
        ),
        Binding("d,delete", "leave_out", "Leave the chunk out", show=False, id="knobs.leave_out"),
    ]
    at = reactive(1)

    def __init__(self) -> None:
        super().__init__(id="knob-list")

    @property
    def place(self) -> Place:
        found = places(self.view.wish)
        return found[min(self.at, len(found) - 1)]

    def draw(self) -> None:
        if self.columns > 20:
            app = self.view
            names = app.chunk_names()
            self.show(knob_lines(app.wish, self.place, names, app.look, self.columns))

    def watch_at(self) -> None:
        self.draw()
        self.keep_in_sight(self.at + (self.at >= len(KNOBS)))

    def on_resize(self) -> None:
        self.draw()

    def action_place(self, step: int) -> None:
        self.at = max(0, min(self.at + step, len(places(self.view.wish)) - 1))

    def action_turn(self, step: int) -> None:
        self.view.wish = turned(self.view.wish, self.place.knob, step)

    def action_shift(self, step: int) -> None:
        if self.place.chunk >= 0:
            before = self.view.wish
            self.view.wish = moved(before, self.place.chunk, step)
            if self.view.wish != before:
                self.at += step

    def action_leave_out(self) -> None:
        number = self.place.chunk
        if number >= 0:
            chunks = self.view.wish.chunks
            self.view.wish = replace(self.view.wish, chunks=chunks[:number] + chunks[number + 1 :])

    def action_edit(self) -> None:
        field = self.screen.query_one("#question", Input)
        field.value = self.view.wish.question
        field.add_class("-open")
        self.screen.set_focus(field)

    def on_click(self, event: events.Click) -> None:
        row = event.y + self.scroll_offset.y
        at = row - (row > len(KNOBS))
        if row == len(KNOBS) or not 0 <= at < len(places(self.view.wish)):
            return
        if at == self.at and at:
            self.action_turn(1)
        self.at = at


class History(Canvas):
    """The runs of the session; a click shows one."""

    def __init__(self) -> None:
        super().__init__(id="history")

    def draw(self) -> None:
        if self.columns > 20:
            self.show(history_lines(self.view.runs, self.view.current, self.columns))

    def on_resize(self) -> None:
        self.draw()

    def on_click(self, event: events.Click) -> None:
        at = event.y + self.scroll_offset.y - 2
        if 0 <= at < len(self.view.runs):
            self.view.current = at


class KnobsView(View):
    help_text = (
        "What to run next: left and right turn the knob of the cursor, Enter writes another "
        "question, K and J move a chunk up and down, d leaves it out; Chunks has all of the store. "
        "g runs it in a thread of its own, x stops waiting for it (what is being computed ends "
        "first, and is thrown away). A finished run is shown by all views, and the runs of this "
        "session are kept beside the knobs: r and R go from one to the next, Compare sets two "
        "beside each other. Context is what chunks that are missing are computed behind."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Leave the question", show=False, id="knobs.leave"),
    ]
    DEFAULT_CSS = """
    KnobsView #knobs-left { width: 1fr; }
    KnobsView #knob-list { height: 1fr; padding: 0 1; }
    KnobsView #status { height: 1; padding: 0 1; background: $surface; }
    KnobsView #question { height: 1; border: none; padding: 0 1; display: none; }
    KnobsView #question.-open { display: block; }
    KnobsView #history { width: 56; padding: 0 1; background: $surface; }
    """

    def compose(self) -> ComposeResult:
        with Vertical(id="knobs-left"):
            yield KnobList()
            yield Input(placeholder="the question", id="question")
            yield Static(id="status", markup=False)
        yield History()

    def present(self, run: Run) -> None:
        self.repaint()

    def repaint(self) -> None:
        self.query_one(KnobList).draw()
        self.query_one(History).draw()

    def tell(self, text: str, role: str = "dim") -> None:
        """Says what the run is doing."""
        self.query_one("#status", Static).update(self.rich([line(span(text, role))]))

    def action_leave(self) -> None:
        self.query_one("#question", Input).remove_class("-open")
        self.query_one(KnobList).focus()

    @on(Input.Submitted, "#question")
    def asked(self, event: Input.Submitted) -> None:
        self.view.wish = replace(self.view.wish, question=event.value.strip())
        self.action_leave()
