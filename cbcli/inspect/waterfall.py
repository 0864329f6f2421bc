"""Where the time went: layer by layer, phase by phase, and beside what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cbcli.inspect.lines import Line, Span, bar, left, line, right, span
from cbcli.inspect.run import Run, ms
from cbcli.inspect.theme import Look
from engine.trace.record import LayerSpan, Phase

PARTS = ("load", "stall", "rotate", "score", "recompute")
WORDS = {
    "load": "load",
    "stall": "wait",
    "rotate": "place",
    "score": "score",
    "recompute": "compute",
}
NUMBERS = 8  # cells of a column of milliseconds


@dataclass(frozen=True)
class Piece:
    """A part of a layer's time, in seconds since the prefill's start."""

    part: str
    start: float
    end: float


@dataclass(frozen=True)
class Way:
    """A time to first token beside the run's own. seconds; note: how it compares."""

    name: str
    seconds: float
    note: str
    role: str


def pieces(layer: LayerSpan) -> tuple[Piece, ...]:
    """A layer's parts in order: loading by itself, the others one after the other; those of a
    question that read first, then what was computed when the layer's turn came."""
    found = []
    if layer.load_s > 0:
        found.append(Piece("load", layer.load_start_s, layer.load_start_s + layer.load_s))
    at = layer.start_s if layer.read_start_s is None else layer.read_start_s
    for part, seconds in (
        ("stall", layer.stall_s),
        ("rotate", layer.rotate_s),
        ("score", layer.score_s),
        ("recompute", layer.recompute_s),
    ):
        if part == "recompute" and layer.read_start_s is not None:
            at = layer.start_s
        if seconds > 0:
            found.append(Piece(part, at, at + seconds))
            at += seconds
    return tuple(found)


def extent(run: Run) -> tuple[float, float]:
    """From when to when layers were at work."""
    every = [piece for layer in run.trace.spans for piece in pieces(layer)]
    start = min((piece.start for piece in every), default=0.0)
    end = max((piece.end for piece in every), default=0.0)
    return min(0.0, start), max(end, float(run.result["timing"]["ttft_s"]))


def drawn(found: tuple[Piece, ...], start: float, end: float, columns: int) -> list[str]:
    """For every column the part that takes most of its time; loading only where nothing else does
    anything; "" where nothing happens."""
    cells = [""] * columns
    if end <= start or not columns:
        return cells
    step = (end - start) / columns
    best = [0.0] * columns
    for piece in found:
        first = max(0, int((piece.start - start) / step) - 1)
        last = min(columns, int((piece.end - start) / step) + 2)
        for column in range(first, last):
            low, high = start + column * step, start + (column + 1) * step
            shared = min(high, piece.end) - max(low, piece.start)
            weight = shared * (1e-6 if piece.part == "load" else 1)
            if weight > best[column]:
                best[column], cells[column] = weight, piece.part
    return cells


def totals(run: Run) -> dict[str, float]:
    """Seconds of each part, over all layers, as the run's own timing has them."""
    timing = run.result["timing"]
    return {
        "load": float(timing["kv_load_s"]),
        "stall": float(timing["kv_stall_s"]),
        "rotate": float(timing["rotate_s"]),
        "score": float(timing["score_s"]),
        "recompute": float(timing["recompute_s"]),
    }


def ways(run: Run) -> tuple[Way, ...]:
    """This run's time to first token, then full prefill's, reuse's and the bound where known."""
    ttft = float(run.result["timing"]["ttft_s"])
    compare = run.result.get("compare")
    found = [Way(run.way, ttft, "this run", "recompute")]
    full = float(compare["ttft_s"]) if compare else None
    if full is not None:
        times = f"{full / ttft:.2f}x this run" if ttft else ""
        found.append(Way("full prefill", full, times, "full"))
    seconds = run.reuse_s if run.result["mode"] != "reuse" else None
    if seconds is not None:
        times = f"{seconds / ttft:.2f}x this run" if ttft else ""
        found.append(Way("reuse", seconds, times, "hit"))
    if run.trace.bound is not None and full is not None:
        least = run.trace.bound * full
        reached = f"{100 * least / ttft:.0f}% of it reached" if ttft else ""
        found.append(Way("bound", least, reached, "rotate"))
    return tuple(found)


def way_lines(run: Run, look: Look, columns: int) -> list[Line]:
    found = ways(run)
    name = min(28, max(len(way.name) for way in found))
    room = max(8, columns - name - 13 - 22)
    most = max(way.seconds for way in found)
    shown = []
    for way in found:
        filled = bar(way.seconds / most if most else 0, room, look.ascii)
        shown.append(
            line(
                span(left(way.name, name), "bold" if way is found[0] else ""),
                Span(right(ms(way.seconds), 11) + "  "),
                Span(left(filled, room), way.role),
                span("  " + way.note, "dim"),
            )
        )
    return shown


def part_legend(run: Run, look: Look, columns: int) -> Line:
    """Signs, colours and sums of the parts."""
    return legend_line(totals(run), look, columns)


def legend_line(sums: Mapping[str, float], look: Look, columns: int) -> Line:
    """Signs, colours and seconds of the parts."""
    sign = 2 if wide_enough(columns) else 1
    parts: list[Span] = []
    for part in PARTS:
        parts += [
            Span(look.part_signs[part] * sign, part),
            Span(f" {WORDS[part]} "),
            Span(ms(sums[part]) + " " * sign, "dim"),
        ]
    return tuple(parts)


def wide_enough(columns: int) -> bool:
    return columns >= 100


def waterfall_lines(run: Run, look: Look, columns: int, cursor: int | None = None) -> list[Line]:
    """A line a layer: its parts along the time, and their milliseconds where there is room."""
    spans = run.trace.spans
    if not spans:
        return [line(span("no layer was timed by itself in this run", "dim"))]
    shown, time = [scale_line(extent(run), look, columns)], extent(run)
    for number, layer in enumerate(spans):
        shown.append(layer_line(number, layer, time, look, columns, cursor=number == cursor))
    return shown


def _room(columns: int) -> int:
    """Cells that the time has in a line of the waterfall."""
    return columns - 6 - (len(PARTS) * NUMBERS if wide_enough(columns) else NUMBERS)


def scale_line(time: tuple[float, float], look: Look, columns: int) -> Line:
    """The head of the waterfall: the times along it, [start, end) in seconds."""
    head = [Span("layer ", "dim"), Span(_scale(*time, _room(columns), look), "dim")]
    names = [WORDS[part] for part in PARTS] if wide_enough(columns) else ["ms"]
    return (*head, *(Span(right(name, NUMBERS), "dim") for name in names))


def layer_line(
    number: int,
    layer: LayerSpan,
    time: tuple[float, float],
    look: Look,
    columns: int,
    *,
    cursor: bool = False,
) -> Line:
    """A layer's parts along the time, [start, end) in seconds."""
    found, signs = pieces(layer), look.part_signs
    parts = [Span(right(str(number), 4) + (" >" if cursor else "  "), "key" if cursor else "dim")]
    text, last = "", ""
    for part in drawn(found, *time, _room(columns)):
        if part != last and text:
            parts.append(Span(text, last))
            text = ""
        last, text = part, text + (signs[part] if part else " ")
    parts.append(Span(text, last))
    sums = {piece.part: piece.end - piece.start for piece in found}
    if wide_enough(columns):
        for part in PARTS:
            value = f"{sums[part] * 1000:.1f}" if part in sums else ""
            parts.append(Span(right(value, NUMBERS), part if cursor else "dim"))
    else:
        total = sum(seconds for part, seconds in sums.items() if part != "load")
        value = f"{total * 1000:.1f}" if found else ""
        parts.append(Span(right(value, NUMBERS), "dim"))
    return tuple(parts)


def _scale(start: float, end: float, columns: int, look: Look) -> str:
    """The times along the waterfall, in milliseconds, about every sixteen cells."""
    marks = [" "] * columns
    count = max(1, columns // 16)
    tick = "|" if look.ascii else "╷"
    for number in range(count):
        at = number * columns // count
        text = f"{tick}{(start + (end - start) * at / columns) * 1000:.0f}"
        for offset, char in enumerate(text):
            if at + offset < columns:
                marks[at + offset] = char
    return "".join(marks)


def phase_lines(run: Run, look: Look, columns: int) -> list[Line]:
    """The phases of the run, each with its bar along the whole of it."""
    return lines_of_phases(run.trace.phases, look, columns)


def lines_of_phases(phases: Sequence[Phase], look: Look, columns: int) -> list[Line]:
    """Phases, each with its bar along the whole of them."""
    if not phases:
        return []
    start = min(phase.start_s for phase in phases)
    end = max(phase.end_s for phase in phases)
    room = max(8, columns - 14 - 11 - 2)
    sign = "#" if look.ascii else "━"
    shown = []
    for phase in phases:
        whole = (end - start) or 1.0
        low = min(room - 1, int((phase.start_s - start) / whole * room))
        high = max(low + 1, round((phase.end_s - start) / whole * room))
        shown.append(
            line(
                span(left(phase.name, 14)),
                Span(right(ms(phase.end_s - phase.start_s), 11) + "  "),
                Span(" " * low),
                Span(sign * (high - low), "phase"),
            )
        )
    return shown
