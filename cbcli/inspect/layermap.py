"""Layers × tokens as a map, and each layer's own figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cbcli.inspect.heat import RAMP, STEPS, Heat, heat_of, pool_mean
from cbcli.inspect.lines import Line, Span, bar, left, line, right, span
from cbcli.inspect.run import Run, number_text
from cbcli.inspect.theme import Look
from engine.trace.heat import edges, pooled
from engine.trace.overlap import of_trace
from engine.trace.overlap import values as deviation_of

EACH = "of each layer"  # a scale: every layer by itself
LABEL = 4  # cells for a layer's number


@dataclass(frozen=True, eq=False)
class Source:
    """What a map can show. layers: M of them; values float32 [M, N], NaN where there is none;
    share: whether they are parts of 1, of which the mean is shown, and not the highest."""

    title: str
    layers: tuple[int, ...]
    values: npt.NDArray[np.float32]
    share: bool = False


@dataclass(frozen=True, eq=False)
class LayerMap:
    """A map brought to a screen. heat.steps [rows, columns]; row_edges, column_edges: where each
    one's layers (as indices of source.layers) and tokens begin, and the end."""

    source: Source
    heat: Heat
    row_edges: tuple[int, ...]
    column_edges: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.row_edges) - 1

    @property
    def columns(self) -> int:
        return len(self.column_edges) - 1

    def peak(self, row: int, column: int) -> tuple[int, int, float]:
        """The layer, the token and the value that a cell's colour stands for: its highest."""
        low, high = self.row_edges[row], self.row_edges[row + 1]
        first, last = self.column_edges[column], self.column_edges[column + 1]
        block = self.source.values[low:high, first:last]
        if np.isnan(block).all():
            return self.source.layers[low], first, float("nan")
        at = np.unravel_index(int(np.nanargmax(block)), block.shape)
        return self.source.layers[low + int(at[0])], first + int(at[1]), float(block[at])

    def place_of(self, layer: int, token: int) -> tuple[int, int]:
        """The cell that shows a token at a layer."""
        index = int(np.searchsorted(np.array(self.source.layers), layer))
        index = min(index, len(self.source.layers) - 1)
        row = int(np.searchsorted(self.row_edges, index, side="right")) - 1
        column = int(np.searchsorted(self.column_edges, token, side="right")) - 1
        return min(row, self.rows - 1), min(column, self.columns - 1)


def sources(run: Run) -> tuple[Source, ...]:
    """All maps of a run; the last one, of what was computed, is there for every run."""
    trace, found = run.trace, []
    if trace.deviations is not None and len(trace.deviations.layers):
        for name, part in (("V", "v"), ("K", "k")):
            rows = deviation_of(trace.deviations, part)
            spread = _spread(run, trace.deviations.positions, rows)
            found.append(Source(f"deviation of {name}", trace.deviations.layers, spread))
    if trace.attention is not None and trace.attention_positions is not None:
        spread = _spread(run, trace.attention_positions, trace.attention)
        if len(spread):
            found.append(Source("question's attention", trace.attention_layers, spread))
    layers = np.arange(run.layers)
    computed = layers[:, None] < trace.tokens.computed[None, :]
    every = tuple(range(run.layers))
    found.append(Source("share computed", every, computed.astype(np.float32), share=True))
    return tuple(found)


def _spread(
    run: Run, positions: npt.NDArray[np.int32], rows: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    spread = np.full((len(rows), run.count), np.nan, dtype=np.float32)
    spread[:, positions] = rows
    return spread


def layer_map(source: Source, columns: int, rows: int, scale: str = "log") -> LayerMap:
    """The map of a source in at most rows × columns cells."""
    count = source.values.shape[1]
    columns, rows = max(1, columns), max(1, rows)
    if source.share:
        small = pool_mean(source.values, columns, rows)
        steps = np.ceil(small * STEPS - 1e-6).astype(np.int8)
        heat = Heat(steps, 0.0, 1.0, "linear")
    else:
        small = pooled(source.values, columns, rows)
        heat = _each(small) if scale == EACH else heat_of(small, scale)
    return LayerMap(
        source,
        heat,
        tuple(edges(len(source.layers), rows)),
        tuple(edges(count, columns)),
    )


def _each(values: npt.NDArray[np.float32]) -> Heat:
    """Every row of a map by its own median and highest."""
    rows = [heat_of(row) for row in values]
    highs = [row.high for row in rows if not np.isnan(row.high)]
    steps = np.stack([row.steps for row in rows])
    return Heat(steps, float("nan"), max(highs, default=float("nan")), EACH)


def halves(rows: int, height: int, look: Look) -> bool:
    """Whether two layers share a line: where there is no room for one each, and colours."""
    return rows > height and not look.signs_only


def tall(rows: int, height: int) -> int:
    """How many lines a layer takes, where there is room for more than one each."""
    return max(1, min(4, height // max(1, rows)))


def map_lines(
    view: LayerMap, look: Look, half: bool, cursor: tuple[int, int] | None, lines: int = 1
) -> list[Line]:
    """The map's lines, with layers' numbers at the left. cursor: (row, column) of the map; lines:
    that each layer takes, where two don't share one."""
    shown: list[Line] = []
    steps = view.heat.steps
    for top in range(0, view.rows, 2 if half else 1):
        here = cursor is not None and cursor[0] in (top, top + 1 if half else top)
        layer = view.source.layers[view.row_edges[cursor[0] if here and cursor else top]]
        label = right(str(layer), LABEL - 1) + (">" if here else " ")
        parts = [Span(label, "key" if here else "dim")]
        text, role = "", ""
        for column in range(view.columns):
            upper = int(steps[top, column])
            if half:
                lower = int(steps[top + 1, column]) if top + 1 < view.rows else 0
                sign, now = _half(upper, lower)
            elif look.signs_only:
                sign, now = RAMP[upper], f"h{upper}"
            else:
                sign, now = " ", f"b{upper}"
            if here and cursor is not None and column == cursor[1]:
                sign, now = ("+" if look.ascii else "┼" if sign in " █" else sign), f"{now} cur"
            if now != role and text:
                parts.append(Span(text, role))
                text = ""
            role, text = now, text + sign
        shown.append((*parts, Span(text, role)))
        shown += [(Span(" " * LABEL), *parts[1:], Span(text, role))] * (lines - 1)
    return shown


def _half(upper: int, lower: int) -> tuple[str, str]:
    """A cell of two: its sign and role."""
    if upper and lower:
        return "▀", f"f{upper} b{lower}"
    if upper:
        return "▀", f"f{upper}"
    return ("▄", f"f{lower}") if lower else (" ", "")


def axis(run: Run, view: LayerMap, look: Look) -> Line:
    """The line under a map that names the chunks where they begin."""
    parts = [Span(" " * LABEL)]
    column = 0
    for number, segment in enumerate(run.segments):
        end = run.segments[number + 1].start if number + 1 < len(run.segments) else run.count
        stop = int(np.searchsorted(view.column_edges[:-1], end))
        stop = view.columns if end >= run.count else stop
        room = stop - column
        if room <= 0:
            continue
        mark = "|" if look.ascii else "▏"
        name = f"{segment.number} {segment.name}" if segment.number else ""
        text = mark + left(span(name).text, room - 1) if segment.number else " " * room
        parts.append(Span(text[:room] if room < 2 else text, segment.status))
        column = stop
    return tuple(parts)


def legend(heat: Heat, look: Look, title: str, share: bool = False) -> Line:
    """The scale: what its two ends stand for."""
    parts = [Span(title, "bold"), Span("  ")]
    if share:
        low, high = "none", "all"
    elif np.isnan(heat.high):
        return (*parts, Span("nothing scored", "dim"))
    elif heat.scale == EACH:
        low, high = "median", "highest"
    else:
        low, high = number_text(heat.low), number_text(heat.high)
    parts.append(Span(f"{low} ", "dim"))
    for step in range(1, STEPS + 1):
        parts.append(Span(RAMP[step] * 2, "") if look.signs_only else Span("  ", f"b{step}"))
    return (*parts, Span(f" {high}", "dim"), Span("" if share else f"  {heat.scale}", "dim"))


@dataclass(frozen=True)
class LayerFacts:
    """One layer. computed: cached tokens that got fresh K and V; k, v: mean deviation; attention:
    the question's mean attention; spearman, jaccard: its deviations beside the check layer's."""

    layer: int
    computed: int
    k: float | None = None
    v: float | None = None
    attention: float | None = None
    spearman: float | None = None
    jaccard: float | None = None


@dataclass(frozen=True)
class Overlap:
    """What layers are compared with. part: "k", "v" or "k+v"; count: tokens in each top set."""

    layer: int
    part: str
    count: int


def overlap_of(run: Run) -> Overlap | None:
    """The check layer, what its policy looks at, and as many tokens as were selected; layer 1
    where the policy checks none. None where deviations weren't recorded, or of exact KV alone."""
    deviations = run.trace.deviations
    if deviations is None or not len(deviations.layers):
        return None
    checks = [stage.layer for stage in run.trace.stages if stage.layer in deviations.layers]
    checks = [layer for layer in checks if layer > 0]
    layer = checks[0] if checks else next((n for n in deviations.layers if n > 0), None)
    if layer is None:
        return None
    policy = str(run.result["policy"]).split(":")[0]
    part = {"key": "k", "key+value": "k+v"}.get(policy, "v")
    hits = np.zeros(run.count, dtype=bool)  # of what is exact there is nothing to choose
    for segment in run.chunks:
        hits[segment.start : segment.end] = segment.status == "hit"
    measured = int(hits[deviations.positions].sum())
    if not measured:
        return None
    chosen = int((run.selected & hits).sum())
    return Overlap(layer, part, chosen if 0 < chosen < measured else max(1, measured * 16 // 100))


@lru_cache(maxsize=8)  # ranks of all tokens in all layers: not at every resize
def layer_facts(run: Run) -> tuple[LayerFacts, ...]:
    """Every layer's figures, as far as they were recorded."""
    trace = run.trace
    beside, deviations = overlap_of(run), trace.deviations
    same = {}
    if beside is not None and deviations is not None:
        found = of_trace(trace, beside.layer, beside.count, beside.part)
        same = {one.layer: one for one in found}
    cached = trace.tokens.computed[run.cached]
    shown = []
    for layer in range(run.layers):
        k = v = attention = None
        if deviations is not None and layer in deviations.layers:
            at = deviations.layers.index(layer)
            if len(deviations.positions):
                k, v = float(deviations.k[at].mean()), float(deviations.v[at].mean())
        if trace.attention is not None and layer in trace.attention_layers:
            row = trace.attention[trace.attention_layers.index(layer)]
            attention = float(row.mean()) if len(row) else None
        one = same.get(layer)
        shown.append(
            LayerFacts(
                layer,
                int((cached > layer).sum()),
                k,
                v,
                attention,
                one.spearman if one else None,
                one.jaccard if one else None,
            )
        )
    return tuple(shown)


@dataclass(frozen=True)
class _Column:
    """Numbers with bars. full: what a whole bar stands for; size: cells of a number."""

    title: str
    values: tuple[float | None, ...]
    full: float
    size: int
    role: str
    whole: bool = False  # numbers without a fraction

    def spans(self, number: int, room: int, look: Look) -> tuple[Span, Span]:
        value = self.values[number]
        if value is None:
            text = "." if look.ascii else "·"
            return Span("  " + right(text, self.size) + " ", "dim"), Span(" " * room)
        text = f"{value:,.0f}" if self.whole else number_text(value)
        drawn = bar(value / self.full if self.full else 0, room, look.ascii)
        return Span("  " + right(text, self.size) + " "), Span(left(drawn, room), self.role)


def _columns(run: Run, found: tuple[LayerFacts, ...]) -> list[_Column]:
    counts = tuple(float(facts.computed) for facts in found)
    shown = [_Column("computed", counts, float(run.cached.sum()), 8, "recompute", whole=True)]
    measured = run.trace.deviations is not None
    for title, values, role in (
        ("dev. K", tuple(facts.k for facts in found), "one"),
        ("dev. V", tuple(facts.v for facts in found), "other"),
        ("attention", tuple(facts.attention for facts in found), "rotate"),
    ):
        known = [value for value in values if value is not None]
        if known and not (measured and title == "attention"):
            shown.append(_Column(title, values, max(known), 8 if measured else 9, role))
    return shown


def layer_lines(run: Run, look: Look, columns: int) -> list[Line]:
    """The figures of all layers as a table with bars."""
    found, beside = layer_facts(run), overlap_of(run)
    bars = _columns(run, found)
    fixed = 5 + sum(3 + column.size for column in bars) + (16 if beside else 0)
    room = max(0, min(24, (columns - fixed) // len(bars)))
    shown: list[Line] = [line(span(_explained(beside), "dim"))]
    heads = [Span("layer", "dim")]
    for column in bars:
        title = left(right(column.title, column.size), column.size + 1 + room)
        heads.append(Span("  " + title, "dim"))
    if beside is not None:
        heads.append(Span(right("rho" if look.ascii else "ρ", 7) + right("same", 9), "dim"))
    shown.append(tuple(heads))
    for number, facts in enumerate(found):
        parts = [Span(right(str(facts.layer), 5))]
        for column in bars:
            parts += column.spans(number, room, look)
        if beside is not None:
            mark = "key" if facts.layer == beside.layer else ""
            parts.append(Span(right(_fixed(facts.spearman), 7), mark))
            parts.append(Span(right(_fixed(facts.jaccard), 9), mark))
        shown.append(tuple(parts))
    return shown


def _explained(beside: Overlap | None) -> str:
    if beside is None:
        return "cached tokens computed at each layer"
    what = {"k": "K", "v": "V", "k+v": "K+V"}[beside.part]
    return (
        f"rank correlation and top {beside.count:,} tokens by {what}, beside layer {beside.layer}"
    )


def _fixed(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
