"""A trace as JSON, for other tools."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import asdict
from typing import Any

from engine.trace.record import Trace

SCHEMA = 1


def to_json(trace: Trace) -> dict[str, Any]:
    """Plain dicts, lists, numbers and texts; see docs/trace.md.

    `tokens.texts` shows a part of a character as U+FFFD; `tokens.bytes` (base64) with `tokens.ends`
    has the exact bytes.
    """
    tokens, deviations = trace.tokens, trace.deviations
    spans = [tokens.span(index) for index in range(len(tokens.ids))]
    return {
        "schema": SCHEMA,
        "id": trace.id,
        "created": trace.created,
        "level": trace.level,
        "question": trace.question,
        "layers": trace.layers,
        "result": trace.result,
        "tokens": {
            "ids": tokens.ids.tolist(),
            "texts": [tokens.text[a:b].decode("utf-8", "replace") for a, b in spans],
            "bytes": b64encode(tokens.text).decode("ascii"),
            "ends": tokens.ends.tolist(),
            "computed": tokens.computed.tolist(),
        },
        "stages": [
            {
                "layer": stage.layer,
                "positions": stage.positions.tolist(),
                "scores": stage.scores.tolist(),
                "selected": stage.selected().tolist(),
            }
            for stage in trace.stages
        ],
        "spans": [asdict(span) for span in trace.spans],
        "phases": [asdict(phase) for phase in trace.phases],
        "answer": [asdict(token) for token in trace.answer],
        "reference": [asdict(token) for token in trace.reference],
        "attention": None
        if trace.attention is None or trace.attention_positions is None
        else {
            "layers": list(trace.attention_layers),
            "positions": trace.attention_positions.tolist(),
            "shares": trace.attention.tolist(),
        },
        "deviations": None
        if deviations is None
        else {
            "layers": list(deviations.layers),
            "positions": deviations.positions.tolist(),
            "k": deviations.k.tolist(),
            "v": deviations.v.tolist(),
        },
        "bound": trace.bound,
        "reuse_ttft_s": trace.reuse_ttft_s,
    }
