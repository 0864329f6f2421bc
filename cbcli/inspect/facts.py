"""What there is to know of one token, for the panel beside the text."""

from __future__ import annotations

import numpy as np

from cbcli.inspect.cells import steady
from cbcli.inspect.lines import COLUMNS, Line, Span, left, line, span
from cbcli.inspect.run import Run, number_text
from cbcli.text import shorten
from engine.trace.record import Floats, Ints

LABEL = 12


def token_text(run: Run, token: int) -> str:
    """A token's text between quotes; bytes that are no whole character as \\x.., all harmless."""
    low, high = run.trace.tokens.span(token)
    raw = run.trace.tokens.text[low:high]
    shown = []
    for char in raw.decode("utf-8", "surrogateescape"):
        code = ord(char)
        if 0xDC80 <= code <= 0xDCFF:
            shown.append(f"\\x{code - 0xDC00:02x}")
        elif char in "\n\t\r":
            shown.append({"\n": "\\n", "\t": "\\t", "\r": "\\r"}[char])
        elif steady(char) != char or code < 0x20:
            shown.append(char.encode("ascii", "backslashreplace").decode())
        else:
            shown.append(char)
    text = "".join(shown)
    return f"'{text}'"


def layers_text(computed: int, layers: int) -> str:
    """In which layers a token was computed, counted from 0."""
    if computed == 0:
        return "none"
    if computed == layers:
        return f"all (0-{layers - 1})"
    return f"0-{computed - 1} of 0-{layers - 1}" if computed > 1 else f"0 of 0-{layers - 1}"


def state_of(run: Run, token: int) -> tuple[str, str]:
    """What happened to a token, in words, and a role for it."""
    segment = run.segment_of(token)
    if run.selected[token]:
        return "cached, recomputed", "sel bold"
    if segment.kind == "chunk" and segment.status in ("exact", "hit"):
        return ("cached, exact" if segment.status == "exact" else "cached, as stored"), "hit"
    return {
        "exact": "stored, exact",
        "miss": "missed, computed",
        "kept": "kept from the turn before",
    }.get(segment.status, "computed"), segment.status


def facts(run: Run, token: int, columns: int) -> list[Line]:
    """The panel's lines."""
    trace = run.trace
    segment = run.segment_of(token)
    low, high = trace.tokens.span(token)
    state, role = state_of(run, token)
    where = f"{segment.number} {segment.name}" if segment.number else segment.name
    shown: list[Line] = [
        line(span(shorten(token_text(run, token), columns), "title")),
        _fact("id", f"{int(trace.tokens.ids[token])}"),
        _fact("position", f"{token:,} of {run.count:,}"),
        _fact("bytes", f"{low:,}-{high:,} ({high - low})"),
        _fact("part of", where),
        _fact("at", f"{token - segment.start:,} of its {segment.tokens:,}"),
    ]
    if segment.chunk_id:
        shown.append(_fact("chunk", segment.chunk_id[:12]))
    if segment.source:
        shown.append(_fact("source", _tail(segment.source, columns - LABEL)))
    shown.append(line(span(left("state", LABEL), "dim"), span(state, role)))
    shown.append(_fact("computed in", layers_text(int(trace.tokens.computed[token]), run.layers)))
    for number, stage in enumerate(trace.stages):
        at = f"layer {stage.layer}" if stage.layer or len(trace.stages) > 1 else "score"
        rank = int(run.ranks[number][token])
        if not rank:
            shown.append(_fact(at, "not scored"))
            continue
        value = float(run.measures[number].values[token])
        shown.append(_fact(at, f"{number_text(value)}"))
        chosen = rank <= stage.chosen
        words = f"{rank:,} of {len(stage.scores):,}, "
        shown.append(
            line(
                span(left("rank", LABEL), "dim"),
                Span(words),
                Span(
                    "chosen" if chosen else "not chosen",
                    "good" if chosen else "dim",
                ),
            )
        )
    for measure in run.measures[len(trace.stages) :]:
        value = float(measure.values[token])
        if not np.isnan(value):
            short = measure.title.replace(", mean over layers", "")
            short = short.replace("question's attention", "attention").replace(
                "deviation of", "dev."
            )
            shown.append(_fact(short, f"{number_text(value)} (mean)"))
    return shown


def by_layer(run: Run, token: int, columns: int) -> list[Line]:
    """What was recorded of a token layer by layer, as rows of columns, the highest of its own
    filling a cell."""
    trace, shown = run.trace, []
    kinds: list[tuple[str, tuple[int, ...], Ints | None, Floats | None]] = []
    if trace.deviations is not None:
        d = trace.deviations
        kinds += [("deviation of V", d.layers, d.positions, d.v)]
        kinds += [("deviation of K", d.layers, d.positions, d.k)]
    kinds.append(
        ("question's attention", trace.attention_layers, trace.attention_positions, trace.attention)
    )
    for title, layers, positions, rows in kinds:
        if positions is None or rows is None or not len(layers):
            continue
        at = int(np.searchsorted(positions, token))
        if at >= len(positions) or positions[at] != token:
            continue
        values = rows[:, at]
        most = float(values.max())
        shown += [(), line(span(f"{title}, by layer", "dim"))]
        steps = np.ceil(values / most * 8).astype(int) if most > 0 else np.zeros(len(values), int)
        bars = "".join(COLUMNS[max(0, min(8, int(step)))] for step in steps)
        for start in range(0, len(bars), columns):
            shown.append(line(Span(bars[start : start + columns], "one")))
        peak = int(np.argmax(values))
        words = f"layers {layers[0]}-{layers[-1]}, most {number_text(most)} at {layers[peak]}"
        shown.append(line(span(words, "dim")))
    return shown


def _tail(text: str, columns: int) -> str:
    """The end of a path, where all of it doesn't fit."""
    return text if len(text) <= columns else "…" + text[len(text) - columns + 1 :]


def _fact(label: str, value: str) -> Line:
    return line(span(left(label, LABEL), "dim"), span(value))
