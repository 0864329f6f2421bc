"""A run as plain text, for where there is no terminal."""

from __future__ import annotations

import numpy as np

from cbcli.inspect.facts import token_text
from cbcli.inspect.lines import EMPTY, Line, Span, line, span, table, wrap
from cbcli.inspect.run import Run, Segment, number_text, percent
from cbcli.inspect.theme import Look
from cbcli.inspect.versus import fact_lines, first_difference, kl_lines, selection_lines
from cbcli.inspect.waterfall import waterfall_lines, way_lines

WIDTH = 100
TOP = 10  # tokens with the highest scores


def summary_lines(run: Run, look: Look | None = None) -> list[Line]:
    """Question and answer, what was done, the chunks, the tokens with the highest scores, time."""
    look = look or Look(color=False)
    result = run.result
    done = result["recomputed"]
    cached = int(run.cached.sum())
    shown: list[Line] = [
        line(f"run       {run.trace.id}"),
        *_long("question", run.trace.question),
        *_long("answer", str(result["answer"])),
        line(
            f"model     {result['model']['name']}, {result['model']['dtype']} on "
            f"{result['model']['device']}, {run.layers} layers"
        ),
        line(
            f"way       {run.way}; {done['tokens']:,} of {cached:,} cached tokens recomputed "
            f"({100 * done['fraction']:.1f}%), {run.count:,} tokens in all"
        ),
    ]
    compare = result.get("compare")
    if compare:
        shown.append(
            line(
                f"quality   mean KL {compare['kl_mean']:.4f} nats, top-1 agreement "
                f"{100 * compare['top1_agreement']:.0f}%; {_parts(run)}"
            )
        )
    shown += [EMPTY, *_chunks(run), EMPTY, *_top(run), EMPTY]
    shown += [line("time to first token"), *way_lines(run, look, WIDTH), EMPTY]
    return [*shown, *waterfall_lines(run, look, WIDTH)]


def pair_lines(one: Run, other: Run, look: Look | None = None) -> list[Line]:
    """Two runs beside each other."""
    look = look or Look(color=False)
    at = first_difference(one.trace.answer, other.trace.answer)
    return [
        *fact_lines(one, other, 2 * WIDTH),
        line(f"answers   {'the same' if at is None else f'part at token {at}'}"),
        *_long("A", str(one.result["answer"])),
        *_long("B", str(other.result["answer"])),
        EMPTY,
        *kl_lines(one, other, look, WIDTH),
        EMPTY,
        *selection_lines(one, other, WIDTH),
    ]


def _long(label: str, text: str) -> list[Line]:
    lines = wrap(text, WIDTH - 10)
    return [line(Span(f"{label if not n else '':<10}"), Span(part)) for n, part in enumerate(lines)]


def _parts(run: Run) -> str:
    at = first_difference(run.trace.answer, run.trace.reference)
    return "the same answer" if at is None else f"answers part at token {at}"


def _chosen_from(segment: Segment) -> bool:
    """Whether tokens of it could be chosen to be recomputed; not of what an earlier turn kept."""
    return segment.number > 0 and segment.status != "kept"


def _chunks(run: Run) -> list[Line]:
    rows: list[list[str | Span]] = []
    for segment in run.segments:
        chosen = int(run.selected[segment.start : segment.end].sum())
        share = f"{chosen:,} ({percent(chosen, segment.tokens)})" if _chosen_from(segment) else ""
        number = str(segment.number) if segment.number else ""
        rows.append(
            [
                number,
                segment.name,
                segment.status,
                f"{segment.start:,}",
                f"{segment.tokens:,}",
                share,
            ]
        )
    heads = ("", "part", "KV", "from", "tokens", "recomputed")
    return table(heads, rows, "rllrrr")


def _top(run: Run) -> list[Line]:
    if not run.measures:
        return [line("no token was scored")]
    measure = run.measures[0]
    values = np.where(np.isnan(measure.values), -np.inf, measure.values)
    order = np.argsort(-values, kind="stable")[:TOP]
    rows: list[list[str | Span]] = []
    for token in (int(token) for token in order if np.isfinite(values[token])):
        segment = run.segment_of(token)
        kept = span("yes" if run.selected[token] else "no")
        rows.append(
            [
                f"{token:,}",
                token_text(run, token)[:30],
                number_text(float(values[token])),
                kept,
                segment.name,
            ]
        )
    heads = ("position", "token", f"highest {measure.title}", "recomputed", "part")
    return table(heads, rows, "rlrll")
