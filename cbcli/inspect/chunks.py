"""The Chunks view: the chunks of the store, to be read and picked for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.reactive import reactive
from textual.widgets import Input, Static

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.lines import EMPTY, Line, line, span, wrap
from cbcli.inspect.run import Run
from cbcli.inspect.runner import StoredChunk
from cbcli.inspect.view import View
from cbcli.inspect.wishes import ORDERS, chunk_head, chunk_line, in_order, matching, toggled


class ChunkList(Canvas):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "space,enter",
            "pick",
            "Pick",
            key_display="space",
            id="chunks.pick",
            tooltip="Take the chunk for the next run, or leave it out",
        ),
        Binding("g", "app.start_run", "Run", id="chunks.run", tooltip="Run it with these chunks"),
        Binding(
            "o",
            "sort",
            "Order",
            show=False,
            id="chunks.order",
            tooltip="The documents' order, or the most tokens, bytes or hits first",
        ),
        Binding("down", "move(1)", "Next chunk", show=False, id="chunks.down"),
        Binding("up", "move(-1)", "Chunk before", show=False, id="chunks.up"),
        Binding("pagedown", "move(15)", "Chunks on", show=False, id="chunks.page_down"),
        Binding("pageup", "move(-15)", "Chunks back", show=False, id="chunks.page_up"),
        Binding("home", "move(-1000000)", "First chunk", show=False, id="chunks.home"),
        Binding("end", "move(1000000)", "Last chunk", show=False, id="chunks.end"),
    ]
    at = reactive(0)

    def __init__(self) -> None:
        super().__init__(id="chunk-list")
        self.found: Sequence[StoredChunk] = ()
        self.wanted, self.order = "", ORDERS[0]
        self._asked: object = None  # what `found` was found for

    @property
    def chunk(self) -> StoredChunk | None:
        return self.found[self.at] if self.at < len(self.found) else None

    def draw(self) -> None:
        if self.columns <= 20:
            return
        asked = (self.view.stored, self.wanted, self.order)
        if asked != self._asked:  # as long as the store is large, so only then
            self._asked = asked
            self.found = in_order(matching(self.view.stored, self.wanted), self.order)
        self.at = max(0, min(self.at, len(self.found) - 1))
        self.virtual_size = Size(self.columns, len(self.found) + 1)
        self.refresh()
        self.tell()

    def line_at(self, number: int) -> Line:
        if not number:
            return chunk_head(self.columns, self.order)
        if number > len(self.found):
            return EMPTY
        mine = number == self.at + 1
        return chunk_line(self.found[number - 1], self.view.wish, self.columns, mine=mine)

    def tell(self) -> None:
        if isinstance(self.screen.query("ChunksView").first(), ChunksView):
            self.screen.query_one(ChunksView).tell()

    def watch_at(self, before: int, now: int) -> None:
        self.redraw((before + 1, now + 1))
        self.keep_in_sight(now + 1)
        if self.is_mounted:
            self.tell()

    def on_resize(self) -> None:
        self.draw()

    def action_move(self, step: int) -> None:
        self.at = max(0, min(self.at + step, len(self.found) - 1))

    def action_sort(self) -> None:
        """Another order; the cursor stays on its chunk."""
        chunk = self.chunk
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self.draw()
        if chunk is not None:
            self.at = self.found.index(chunk)
            self.keep_in_sight(self.at + 1)

    def action_pick(self) -> None:
        if self.chunk is not None:
            self.view.wish = toggled(self.view.wish, self.chunk.chunk_id)

    def on_click(self, event: events.Click) -> None:
        at = event.y + self.scroll_offset.y - 1
        if at == -1:
            self.action_sort()
        if 0 <= at < len(self.found):
            if at == self.at:
                self.action_pick()
            self.at = at


class ChunksView(View):
    help_text = (
        "The chunks of the store, the bytes of their KV and how often it was used. Space picks "
        "one for the next run, behind those picked before: the number at the left is its place in "
        "the prompt, which Knobs changes. o, or a click on the head, sorts. A search looks "
        "in texts, names of documents and ids."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash",
            "search",
            "Search",
            key_display="/",
            id="chunks.search",
            tooltip="Only chunks with a text",
        ),
        Binding("escape", "leave", "All chunks", show=False, id="chunks.leave"),
    ]
    DEFAULT_CSS = """
    ChunksView #chunks-left { width: 1fr; }
    ChunksView #chunk-list { height: 1fr; }
    ChunksView #chunk-search { height: 1; border: none; padding: 0 1; display: none; }
    ChunksView #chunk-search.-open { display: block; }
    ChunksView #chunk-text { width: 50; height: 100%; padding: 0 1; background: $surface;
                             overflow-y: auto; }
    """

    def compose(self) -> ComposeResult:
        with Vertical(id="chunks-left"):
            yield ChunkList()
            yield Input(placeholder="only chunks with this text", id="chunk-search")
        yield Static(id="chunk-text", markup=False)

    def present(self, run: Run) -> None:
        self.repaint()

    def repaint(self) -> None:
        self.query_one(ChunkList).draw()

    def tell(self) -> None:
        """Shows the text of the cursor's chunk."""
        chunk, panel = self.query_one(ChunkList).chunk, self.query_one("#chunk-text", Static)
        if chunk is None:
            said = self.view.stored_said
            panel.update(self.rich([line(span(part, "dim")) for part in wrap(said, 46)]))
            return
        columns = max(20, panel.content_region.width or 46)
        shown = [
            line(span(chunk.chunk_id[:24], "title")),
            line(span(chunk.source[-columns:], "dim")),
        ]
        shown += [line(span(part)) for part in wrap(chunk.text, columns)]
        panel.update(self.rich(shown))

    def action_search(self) -> None:
        field = self.query_one("#chunk-search", Input)
        field.add_class("-open")
        self.screen.set_focus(field)

    def action_leave(self) -> None:
        field = self.query_one("#chunk-search", Input)
        field.remove_class("-open")
        field.value = ""
        self.query_one(ChunkList).focus()

    @on(Input.Changed, "#chunk-search")
    def changed(self, event: Input.Changed) -> None:
        chunks = self.query_one(ChunkList)
        chunks.wanted = event.value
        chunks.draw()

    @on(Input.Submitted, "#chunk-search")
    def searched(self) -> None:
        self.query_one(ChunkList).focus()
