"""The Tokens view: the prompt as text, tokens coloured by score, and what is known of one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Input, Static

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.facts import by_layer, facts
from cbcli.inspect.heat import SCALES, Heat, heat_of
from cbcli.inspect.layermap import legend
from cbcli.inspect.lines import EMPTY, Line, Span, fit, line, span, width_of
from cbcli.inspect.page import GUTTER, Marks, Page, find, lay_out
from cbcli.inspect.run import Run
from cbcli.inspect.view import View

PANEL = 38  # cells of the panel's text, where it stands beside the page


class TokenPage(Canvas):
    """The prompt's text, with a cursor on one token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "n",
            "selected(1)",
            "Recomputed",
            id="tokens.next",
            tooltip="To the next recomputed token",
        ),
        Binding("N", "selected(-1)", "Recomputed before", show=False, id="tokens.previous"),
        Binding("m", "measure", "Colour", id="tokens.measure", tooltip="Colour by another measure"),
        Binding(
            "l",
            "scale",
            "Scale",
            show=False,
            id="tokens.scale",
            tooltip="Scale of colours: log, linear or rank",
        ),
        Binding("right", "token(1)", "Next token", show=False, id="tokens.right"),
        Binding("left", "token(-1)", "Token before", show=False, id="tokens.left"),
        Binding("down", "row(1)", "Next line", show=False, id="tokens.down"),
        Binding("up", "row(-1)", "Line before", show=False, id="tokens.up"),
        Binding("pagedown,space", "page(1)", "Next page", show=False, id="tokens.page_down"),
        Binding("pageup", "page(-1)", "Page before", show=False, id="tokens.page_up"),
        Binding("home", "token_at(0)", "First token", show=False, id="tokens.home"),
        Binding("end", "token_at(-1)", "Last token", show=False, id="tokens.end"),
        Binding("]", "chunk(1)", "Next chunk", show=False, id="tokens.next_chunk"),
        Binding("[", "chunk(-1)", "Chunk before", show=False, id="tokens.previous_chunk"),
        Binding("f", "match(1)", "Next match", show=False, id="tokens.next_match"),
        Binding("F", "match(-1)", "Match before", show=False, id="tokens.previous_match"),
    ]

    cursor = reactive(0)

    class Moved(Message):
        """The cursor is on another token, or something else about what is shown changed."""

    def __init__(self) -> None:
        super().__init__(id="page")
        self.page: Page | None = None
        self.run: Run | None = None
        self.heat: Heat | None = None
        self.measure, self.scale = 0, SCALES[0]
        self.matches: list[tuple[int, int]] = []
        self._marks: Marks | None = None

    def set_run(self, run: Run) -> None:
        changed = run is not self.run
        self.run = run
        if changed:
            self.page, self.matches, self.measure = None, [], 0
            self.set_reactive(TokenPage.cursor, min(self.view.token, run.count - 1))
        self.paint()
        self.arrange_text()

    def paint(self) -> None:
        """Works out the colours."""
        if self.run is None:
            return
        measures = self.run.measures
        values = (
            measures[self.measure % len(measures)].values
            if measures
            else np.full(self.run.count, np.nan, dtype=np.float32)
        )
        self.heat = heat_of(values, self.scale)
        found = None
        if self.matches:
            found = np.zeros(self.run.count, dtype=bool)
            for start, end in self.matches:
                found[start:end] = True
        self._marks = Marks(self.heat.steps, self.run.selected, self.cursor, found)
        self.refresh()
        self.post_message(self.Moved())

    def arrange_text(self) -> None:
        """Lays the text out, where the width or what is shown has changed."""
        width = self.scrollable_content_region.width
        if self.run is None or width < 1:
            return
        page = self.page
        if page is None or page.width != max(12, width) or page.look.ascii != self.view.look.ascii:
            self.page = page = lay_out(self.run, width, self.view.look)
        self.virtual_size = Size(width, len(page.rows))
        self.keep_in_sight(page.row_of_token(self.cursor))
        self.refresh()

    def on_resize(self) -> None:
        self.arrange_text()

    def line_at(self, number: int) -> Line:
        if self.page is None or self._marks is None or not 0 <= number < len(self.page.rows):
            return EMPTY
        return self.page.line(number, self._marks)

    def watch_cursor(self, before: int, now: int) -> None:
        if self.page is None or self._marks is None or self.run is None:
            return
        found = self._marks
        self._marks = Marks(found.steps, found.selected, now, found.matches)
        self.view.token = now
        self.redraw(self.page.rows_of_token(min(before, self.run.count - 1)))
        self.redraw(self.page.rows_of_token(now))
        self.keep_in_sight(self.page.row_of_token(now))
        self.post_message(self.Moved())

    # Going somewhere

    def go(self, token: int) -> None:
        if self.run is not None:
            self.cursor = max(0, min(token, self.run.count - 1))

    def action_token(self, step: int) -> None:
        self.go(self.cursor + step)

    def action_token_at(self, token: int) -> None:
        if self.run is not None:
            self.go(token if token >= 0 else self.run.count + token)

    def action_row(self, step: int) -> None:
        if self.page is None:
            return
        row, column = self.page.row_of_token(self.cursor), self.page.column_of_token(self.cursor)
        if step > 0:
            row = max(row, self.page.rows_of_token(self.cursor)[-1])
        while 0 <= (row := row + step) < len(self.page.rows):
            token = self.page.token_at(row, max(column, GUTTER))
            if token is not None and token != self.cursor:
                self.go(token)
                return

    def action_page(self, step: int) -> None:
        if self.page is None:
            return
        height = max(1, self.size.height - 1)
        row = self.page.row_of_token(self.cursor) + step * height
        row = max(0, min(row, len(self.page.rows) - 1))
        self.scroll_relative(y=step * height, animate=False)
        for at in (row, row + 1, row - 1):
            token = self.page.token_at(at, self.page.column_of_token(self.cursor))
            if token is not None:
                self.go(token)
                return

    def action_selected(self, step: int) -> None:
        if self.run is None:
            return
        found = self.run.trace.selected
        if not len(found):
            self.notify("nothing cached was recomputed in this run", severity="warning")
            return
        at = int(np.searchsorted(found, self.cursor + (step > 0), side="left"))
        self.go(int(found[(at if step > 0 else at - 1) % len(found)]))

    def action_chunk(self, step: int) -> None:
        if self.run is None:
            return
        at = self.run.segment_index(self.cursor)
        if step < 0 and self.cursor > self.run.segments[at].start:
            self.go(self.run.segments[at].start)
            return
        segments = self.run.segments
        while 0 <= (at := at + step) < len(segments):
            if segments[at].kind != "separator":
                self.go(segments[at].start)
                return

    def action_measure(self) -> None:
        if self.run is not None and self.run.measures:
            self.measure = (self.measure + 1) % len(self.run.measures)
            self.paint()

    def action_scale(self) -> None:
        self.scale = SCALES[(SCALES.index(self.scale) + 1) % len(SCALES)]
        self.paint()

    # Searching

    def search(self, text: str) -> None:
        """Marks every place of `text` and goes to the first behind the cursor; `:12` goes to a
        position."""
        if self.run is None:
            return
        if text[:1] == ":" and text[1:].strip().isdecimal():
            self.go(int(text[1:]))
            return
        self.matches = find(self.run, text)
        self.paint()
        if self.matches:
            ahead = [start for start, _ in self.matches if start >= self.cursor]
            self.go(ahead[0] if ahead else self.matches[0][0])
        elif text:
            self.notify(f"not found: {span(text[:60]).text}", severity="warning", markup=False)

    def action_match(self, step: int) -> None:
        if not self.matches:
            self.notify("search first: /", severity="warning")
            return
        starts = [start for start, _ in self.matches]
        at = int(np.searchsorted(starts, self.cursor + (step > 0), side="left"))
        self.go(starts[(at if step > 0 else at - 1) % len(starts)])

    def on_click(self, event: events.Click) -> None:
        if self.page is not None:
            token = self.page.token_at(event.y + self.scroll_offset.y, event.x)
            if token is not None:
                self.go(token)

    # What is said around it

    def legend(self) -> Line:
        if self.run is None or self.heat is None:
            return EMPTY
        measures, look = self.run.measures, self.view.look
        title = measures[self.measure].title if measures else "no scores in this run"
        shown = legend(self.heat, look, title) if measures else line(span(title, "dim"))
        mark = Span("[recomputed]") if look.ascii else Span("recomputed", "sel")
        said = (*shown, Span("  "), mark)
        statuses = self._statuses()
        room = self.size.width - 4 - width_of(said)
        return (*said, *statuses) if width_of(tuple(statuses)) <= room else said

    def _statuses(self) -> list[Span]:
        signs = self.view.look.status_signs
        parts: list[Span] = []
        segments = self.run.segments if self.run else ()
        for status in dict.fromkeys(segment.status for segment in segments):
            parts += [Span("  "), Span(f"{signs[status]} {status}", status)]
        return parts


class TokensView(View):
    """The page, its legend, the panel, and the line to search in."""

    help_text = (
        "The prompt as the model got it, in its order. A token's colour is its score: the "
        "stronger, the more its stored KV was in need of being computed again, as the policy saw "
        "it. Underlined tokens were recomputed (without underlines: between brackets). The sign at "
        "the left says where a part's KV came from: exact (computed behind the very tokens it "
        "stands behind), hit (stored, computed elsewhere), miss and computed. Characters without a "
        "width are shown as a dot, control characters as their names; tokens that are parts of one "
        "character share its cells. Search goes to a position with a colon: `:512`."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash",
            "search",
            "Search",
            key_display="/",
            id="tokens.search",
            tooltip="Search the prompt's text; :512 goes to a position",
        ),
        Binding("escape", "leave", "Leave the search", show=False, id="tokens.leave"),
    ]
    DEFAULT_CSS = """
    TokensView #page { width: 1fr; height: 1fr; }
    TokensView #legend { height: 1; padding: 0 1 0 2; }
    TokensView #left { width: 1fr; }
    TokensView #search { dock: bottom; height: 1; border: none; padding: 0 1; display: none; }
    TokensView #search.-open { display: block; }
    TokensView #panel { width: 41; height: 100%; padding: 0 1; background: $surface;
                        border-left: vkey $panel; overflow-y: auto; }
    """

    def compose(self) -> ComposeResult:
        with Vertical(id="left"):
            yield TokenPage()
            yield Static(id="legend", markup=False)
            yield Input(placeholder="text to search, or :position", id="search")
        yield Static(id="panel", markup=False)

    @property
    def page(self) -> TokenPage:
        return self.query_one(TokenPage)

    def present(self, run: Run) -> None:
        self.page.set_run(run)
        self.page.go(self.view.token)

    def on_resize(self) -> None:
        self.tell()

    def repaint(self) -> None:
        self.page.paint()
        self.page.arrange_text()

    @on(TokenPage.Moved)
    def tell(self) -> None:
        """Fills the panel and the legend."""
        page = self.page
        if page.run is None:
            return
        panel = self.query_one("#panel", Static)
        narrow = self.screen.has_class("-narrow")
        columns = self.view.size.width - 2 if narrow else PANEL
        shown = facts(page.run, page.cursor, columns)
        if narrow:
            shown = _two_columns(shown, columns)
        elif not self.view.look.ascii:
            shown += by_layer(page.run, page.cursor, columns)
        panel.update(self.rich([fit(one, columns) for one in shown]))
        self.query_one("#legend", Static).update(self.rich([page.legend()]))

    def action_search(self) -> None:
        field = self.query_one("#search", Input)
        field.add_class("-open")
        self.screen.set_focus(field)

    def action_leave(self) -> None:
        field = self.query_one("#search", Input)
        field.remove_class("-open")
        self.page.matches = []
        self.page.paint()
        self.page.focus()

    @on(Input.Submitted, "#search")
    def searched(self, event: Input.Submitted) -> None:
        self.query_one("#search", Input).remove_class("-open")
        self.page.focus()
        self.page.search(event.value)


def _two_columns(shown: list[Line], columns: int) -> list[Line]:
    """Lines in two columns, for a panel that is wide and low."""
    half = (len(shown) + 1) // 2
    room = (columns - 2) // 2
    pairs = []
    for number in range(half):
        other = shown[number + half] if number + half < len(shown) else EMPTY
        pairs.append((*fit(shown[number], room), Span("  "), *fit(other, room)))
    return pairs
