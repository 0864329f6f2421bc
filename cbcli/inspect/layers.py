"""The Layers view: a map of layers and tokens, and each layer's figures."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.reactive import reactive

from cbcli.inspect.canvas import Canvas
from cbcli.inspect.facts import token_text
from cbcli.inspect.heat import SCALES as HEAT_SCALES
from cbcli.inspect.layermap import (
    EACH,
    LABEL,
    LayerMap,
    Source,
    axis,
    halves,
    layer_lines,
    layer_map,
    legend,
    map_lines,
    sources,
    tall,
)
from cbcli.inspect.lines import Line, left, line, span
from cbcli.inspect.run import Run, number_text
from cbcli.inspect.view import View

SCALES = (*HEAT_SCALES, EACH)
TOP, BOTTOM = 1, 2  # lines over and under the map


class MapCanvas(Canvas):
    """The map, with a cursor on one layer and a range of tokens."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "source", "Map", id="layers.source", tooltip="Show another map"),
        Binding(
            "l",
            "scale",
            "Scale",
            id="layers.scale",
            tooltip="log, linear, rank or by layer",
        ),
        Binding(
            "enter",
            "open",
            "Token",
            key_display="enter",
            id="layers.token",
            tooltip="Look at the token of this cell's peak",
        ),
        Binding("up", "move(-1,0)", "Layer before", show=False, id="layers.up"),
        Binding("down", "move(1,0)", "Next layer", show=False, id="layers.down"),
        Binding("left", "move(0,-1)", "Tokens before", show=False, id="layers.left"),
        Binding("right", "move(0,1)", "Next tokens", show=False, id="layers.right"),
        Binding("home", "edge(0)", "First token", show=False, id="layers.home"),
        Binding("end", "edge(-1)", "Last token", show=False, id="layers.end"),
    ]
    cursor = reactive((0, 0))

    def __init__(self) -> None:
        super().__init__(id="map")
        self.run: Run | None = None
        self.found: tuple[Source, ...] = ()
        self.source, self.scale = 0, SCALES[0]
        self.map: LayerMap | None = None
        self.half, self.tall = False, 1

    def set_run(self, run: Run) -> None:
        if run is not self.run:
            self.run, self.found, self.source, self.map = run, sources(run), 0, None
            checks = [stage.layer for stage in run.trace.stages]
            self.set_reactive(MapCanvas.cursor, (checks[0] if checks else 0, 0))
        self.draw()

    def place(self, token: int) -> None:
        """Puts the cursor over a token."""
        if self.map is not None:
            _, column = self.map.place_of(self.map.source.layers[0], token)
            self.cursor = (self.cursor[0], column)

    def draw(self) -> None:
        """Brings the map to the size there is."""
        height = self.size.height - TOP - BOTTOM
        if self.run is None or height < 1 or self.columns <= LABEL:
            return
        source = self.found[self.source % len(self.found)]
        self.half = halves(len(source.layers), height, self.view.look)
        self.tall = tall(len(source.layers), height)
        rows = height * (2 if self.half else 1)
        self.map = layer_map(source, self.columns - LABEL, rows, self.scale)
        row, column = self.cursor
        bounded = (min(row, self.map.rows - 1), min(column, self.map.columns - 1))
        if bounded != self.cursor:
            self.cursor = bounded
        self._say()

    def _say(self) -> None:
        if self.map is None or self.run is None:
            return
        look = self.view.look
        self.show(
            [
                legend(self.map.heat, look, self.map.source.title, self.map.source.share),
                *map_lines(self.map, look, self.half, self.cursor, self.tall),
                axis(self.run, self.map, look),
                self.told(),
            ]
        )
        self.virtual_size = Size(self.columns, len(self.lines))

    def told(self) -> Line:
        """What is under the cursor."""
        assert self.map is not None
        assert self.run is not None
        layer, token, value = self.map.peak(*self.cursor)
        column = self.cursor[1]
        first, last = self.map.column_edges[column], self.map.column_edges[column + 1] - 1
        segment = self.run.segment_of(token)
        where = f"{segment.number} {segment.name}" if segment.number else segment.name
        where = left(span(where).text, max(16, self.columns - 44)).rstrip()
        tokens = f"tokens {first:,}-{last:,}" if last > first else f"token {first:,}"
        parts = [span(f"layer {layer}, {tokens}, {where}: ", "dim")]
        if np.isnan(value):
            parts.append(span("nothing recorded", "dim"))
        elif self.map.source.share:
            row = self.cursor[0]
            low, high = self.map.row_edges[row], self.map.row_edges[row + 1]
            share = float(self.map.source.values[low:high, first : last + 1].mean())
            parts.append(span(f"{100 * share:.0f}% computed", "bold"))
        else:
            parts.append(span(f"{number_text(value)} at {token:,} ", "bold"))
            parts.append(span(token_text(self.run, token)))
        return line(*parts)

    def watch_cursor(self) -> None:
        self._say()

    def on_resize(self) -> None:
        self.draw()

    def action_move(self, rows: int, columns: int) -> None:
        if self.map is not None:
            row = max(0, min(self.cursor[0] + rows, self.map.rows - 1))
            column = max(0, min(self.cursor[1] + columns, self.map.columns - 1))
            self.cursor = (row, column)

    def action_edge(self, column: int) -> None:
        if self.map is not None:
            self.cursor = (self.cursor[0], column % self.map.columns)

    def action_source(self) -> None:
        self.source = (self.source + 1) % max(1, len(self.found))
        self.draw()

    def action_scale(self) -> None:
        self.scale = SCALES[(SCALES.index(self.scale) + 1) % len(SCALES)]
        self.draw()

    def action_open(self) -> None:
        if self.map is not None:
            self.view.look_at(self.map.peak(*self.cursor)[1])

    def on_click(self, event: events.Click) -> None:
        if self.map is None:
            return
        row = (event.y + self.scroll_offset.y - TOP) * (2 if self.half else 1) // self.tall
        column = event.x - LABEL
        if 0 <= row < self.map.rows and 0 <= column < self.map.columns:
            self.cursor = (row, column)


class LayerTable(Canvas):
    """Each layer's figures."""

    def __init__(self) -> None:
        super().__init__(id="layer-table")
        self.run: Run | None = None

    def set_run(self, run: Run) -> None:
        self.run = run
        self.draw()

    def draw(self) -> None:
        if self.run is not None and self.columns > 1:
            self.show(layer_lines(self.run, self.view.look, self.columns))

    def on_resize(self) -> None:
        self.draw()


class LayersView(View):
    help_text = (
        "Rows are layers, columns ranges of tokens. A cell has the colour of its highest value, so "
        "that a single token's peak stays to be seen. Maps: the deviation of V and of K from full "
        "prefill's (recorded with --trace-level full), how much the question looks at each token "
        "(where the policy asked it), and which tokens were computed at which layer. The table "
        "has each layer's means, and how well the check layer's deviations predict it: Spearman's "
        "correlation of all tokens' ranks, and how many of the top tokens are the same (Jaccard)."
    )
    DEFAULT_CSS = """
    LayersView #map { width: 1fr; height: 1fr; }
    LayersView #layer-table { width: 64; padding: 0 0 0 2; }
    """

    def compose(self) -> ComposeResult:
        yield MapCanvas()
        yield LayerTable()

    def present(self, run: Run) -> None:
        self.query_one(MapCanvas).set_run(run)
        self.query_one(LayerTable).set_run(run)
        self.query_one(MapCanvas).place(self.view.token)

    def repaint(self) -> None:
        self.query_one(MapCanvas).draw()
        self.query_one(LayerTable).draw()
