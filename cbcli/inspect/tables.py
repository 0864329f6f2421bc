"""A run's numbers as plain rows, for JSON and CSV: raw, in seconds, bytes and tokens."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cbcli.inspect.layermap import layer_facts, overlap_of
from cbcli.inspect.run import Run
from cbcli.text import visible
from engine.trace import to_json

Row = dict[str, Any]
FORMULA = ("=", "+", "-", "@")  # what begins one, in some spreadsheet


def token_rows(run: Run) -> list[Row]:
    """A row a token: its place, text, KV's origin, whether it was recomputed, scores."""
    trace, rows = run.trace, []
    for token in range(run.count):
        low, high = trace.tokens.span(token)
        segment = run.segment_of(token)
        row: Row = {
            "position": token,
            "id": int(trace.tokens.ids[token]),
            "text": trace.tokens.text[low:high].decode("utf-8", "backslashreplace"),
            "start_byte": low,
            "end_byte": high,
            "segment": segment.kind,
            "chunk": segment.number or None,
            "chunk_id": segment.chunk_id,
            "status": segment.status,
            "selected": bool(run.selected[token]),
            "computed_layers": int(trace.tokens.computed[token]),
        }
        for number, measure in enumerate(run.measures):
            row[measure.title] = _number(float(measure.values[token]))
            if number < len(run.ranks):
                row[f"rank, {measure.title}"] = int(run.ranks[number][token]) or None
        rows.append(row)
    return rows


def layer_rows(run: Run) -> list[Row]:
    """A row a layer: what was computed, deviations and overlap where recorded."""
    return [
        {
            "layer": facts.layer,
            "cached_tokens_computed": facts.computed,
            "mean_deviation_k": facts.k,
            "mean_deviation_v": facts.v,
            "mean_attention": facts.attention,
            "spearman": facts.spearman,
            "jaccard": facts.jaccard,
        }
        for facts in layer_facts(run)
    ]


def time_rows(run: Run) -> list[Row]:
    """A row a layer: seconds of its parts."""
    return [
        {
            "layer": number,
            "start_s": layer.start_s,
            "load_start_s": layer.load_start_s,
            "load_s": layer.load_s,
            "stall_s": layer.stall_s,
            "rotate_s": layer.rotate_s,
            "score_s": layer.score_s,
            "recompute_s": layer.recompute_s,
            "read_start_s": layer.read_start_s,
        }
        for number, layer in enumerate(run.trace.spans)
    ]


def answer_rows(run: Run) -> list[Row]:
    """A row a token of the answer and of full prefill's beside it, with its KL."""
    answer, reference = run.trace.answer, run.trace.reference
    rows = []
    for number in range(max(len(answer), len(reference))):
        mine = answer[number] if number < len(answer) else None
        full = reference[number] if number < len(reference) else None
        rows.append(
            {
                "token": number,
                "answer_id": mine.id if mine else None,
                "answer": mine.text if mine else None,
                "full_id": full.id if full else None,
                "full": full.text if full else None,
                "kl": _number(full.kl) if full and full.kl is not None else None,
            }
        )
    return rows


VIEWS: Mapping[str, Callable[[Run], Sequence[Row]]] = {
    "tokens": token_rows,
    "layers": layer_rows,
    "time": time_rows,
    "compare": answer_rows,
}


def rows_of(view: str, run: Run) -> Sequence[Row]:
    """The table of a view; of views that have none, the tokens'."""
    return VIEWS.get(view, token_rows)(run)


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV, their keys as the first line. Texts are for reading: their control characters
    are shown as signs, and before one that a spreadsheet would take for a formula stands a '. JSON
    has texts as they are."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = visible(value)
    return "'" + text if text.lstrip()[:1] in FORMULA else text


def json_text(runs: Sequence[Run]) -> str:
    """One object for one run, a list for several, on one line."""
    found = [as_json(run) for run in runs]
    return json.dumps(found[0] if len(found) == 1 else found, allow_nan=False) + "\n"


def as_json(run: Run) -> Row:
    """A trace's own JSON (see `engine.trace.to_json`), and what the Layers view works out:
    `per_layer`, and `overlap`, what layers are compared with."""
    beside = overlap_of(run)
    overlap = None
    if beside is not None:
        overlap = {"check_layer": beside.layer, "part": beside.part, "top": beside.count}
    return {**to_json(run.trace), "per_layer": layer_rows(run), "overlap": overlap}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
