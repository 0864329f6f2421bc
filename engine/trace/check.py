"""What holds of every trace, so that whoever shows one need not look again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from engine.trace import schema
from engine.trace.record import VERSION, AnswerToken, Deviations, Level, Stage, Trace

PHASES = (
    *("open", "tokenize", "retrieve", "find", "read question", "layers", "logits", "decode"),
    "compare",
)
MOST_LAYERS = 2**15 - 1
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")


def check(trace: Trace) -> None:
    """Raises ValueError, naming what is wrong with a trace."""
    _head(trace)
    count = _tokens(trace)
    _result(trace, count)
    if not all(a.layer < b.layer for a, b in pairwise(trace.stages)):
        raise ValueError("stages are out of order")
    for stage in trace.stages:
        _stage(stage, trace.layers, count)
    _times(trace)
    for token in (*trace.answer, *trace.reference):
        _answer(token)
    _attention(trace, count)
    if trace.deviations is not None:
        _deviations(trace.deviations, trace, count)


def _head(trace: Trace) -> None:
    if trace.version != VERSION:
        raise ValueError(f"version {trace.version}")
    if not isinstance(trace.id, str) or not _ID.fullmatch(trace.id):
        raise ValueError("no name")
    if trace.level not in get_args(Level):
        raise ValueError("no level")
    schema.conform(trace.created, schema.amount, "created")
    if trace.created >= 253402300800:
        raise ValueError("created after the year 9999")
    schema.conform(trace.question, schema.text, "question")
    schema.conform(trace.layers, schema.count, "layers")
    if not 1 <= trace.layers <= MOST_LAYERS:
        raise ValueError(f"{trace.layers} layers")
    for name, value in (("bound", trace.bound), ("reuse_ttft_s", trace.reuse_ttft_s)):
        schema.conform(value, (schema.amount, None), name)


def _tokens(trace: Trace) -> int:
    tokens = trace.tokens
    count = len(tokens.ids)
    if not count:
        raise ValueError("no token")
    _array(tokens.ids, np.int32, (count,), "token ids")
    _array(tokens.ends, np.int32, (count,), "tokens' ends")
    _array(tokens.computed, np.int16, (count,), "computed layers")
    if tokens.ids.min() < 0:
        raise ValueError("a token id below 0")
    if (
        tokens.ends[0] < 0
        or (np.diff(tokens.ends) < 0).any()
        or tokens.ends[-1] != len(tokens.text)
    ):
        raise ValueError("tokens' ends do not fit their text")
    if tokens.computed.min() < 0 or tokens.computed.max() > trace.layers:
        raise ValueError("computed layers that are not there")
    return count


def _result(trace: Trace, count: int) -> None:
    schema.conform(trace.result, schema.RESULT, "result")
    prompt = trace.result["prompt"]
    ids = prompt.get("token_ids")
    if not isinstance(ids, list | tuple) or list(ids) != trace.tokens.ids.tolist():
        raise ValueError("the result has other tokens")
    end = 0
    for segment in prompt["segments"]:
        if segment["start"] != end or segment["end"] <= end:
            raise ValueError("segments with gaps")
        end = segment["end"]
    if end != count:
        raise ValueError("segments of another length")
    if len(trace.result["recomputed"]["per_layer"]) != trace.layers:
        raise ValueError("recomputed layers of another model")
    if len(trace.result["timing"]["layers"]) not in (0, trace.layers):
        raise ValueError("times of another model's layers")


def _stage(stage: Stage, layers: int, count: int) -> None:
    _layers((stage.layer,), layers, "a stage")
    _positions(stage.positions, count, "a stage")
    _array(stage.scores, np.float32, stage.positions.shape, "scores")
    _finite(stage.scores, "scores")
    schema.conform(stage.chosen, schema.count, "chosen")
    if stage.chosen > len(stage.positions):
        raise ValueError("more chosen than there were")


def _times(trace: Trace) -> None:
    if len(trace.spans) not in (0, trace.layers):
        raise ValueError("spans of another model's layers")
    for span in trace.spans:
        for name, value in vars(span).items():
            spec: Any = (schema.amount, None) if name == "read_start_s" else schema.amount
            schema.conform(value, spec, f"span.{name}")
    for phase in trace.phases:
        schema.conform(phase.name, schema.one_of(*PHASES), "phase.name")
        schema.conform(phase.start_s, schema.number, "phase.start_s")
        schema.conform(phase.end_s, schema.number, "phase.end_s")
        if phase.end_s < phase.start_s:
            raise ValueError("a phase that ends before it begins")


def _answer(token: AnswerToken) -> None:
    schema.conform(token.id, schema.count, "answer.id")
    schema.conform(token.text, schema.text, "answer.text")
    schema.conform(token.kl, (schema.amount, None), "answer.kl")


def _attention(trace: Trace, count: int) -> None:
    positions, amounts = trace.attention_positions, trace.attention
    if positions is None or amounts is None:
        if trace.attention_layers or positions is not None or amounts is not None:
            raise ValueError("half of the attention")
        return
    _layers(trace.attention_layers, trace.layers, "attention")
    _positions(positions, count, "attention")
    _array(amounts, np.float32, (len(trace.attention_layers), len(positions)), "attention")
    _finite(amounts, "attention", low=0)


def _deviations(found: Deviations, trace: Trace, count: int) -> None:
    if trace.level != "full" or not found.layers:
        raise ValueError("deviations that were not measured")
    _layers(found.layers, trace.layers, "deviations")
    _positions(found.positions, count, "deviations")
    for values in (found.k, found.v):
        _array(values, np.float32, (len(found.layers), len(found.positions)), "deviations")
        _finite(values, "deviations", low=0)


def _layers(found: Sequence[int], layers: int, what: str) -> None:
    for layer in found:
        schema.conform(layer, schema.count, f"{what}.layer")
    if any(layer >= layers for layer in found):
        raise ValueError(f"{what} at a layer that is not there")
    if any(b <= a for a, b in pairwise(found)):
        raise ValueError(f"{what} at layers out of order")


def _positions(found: npt.NDArray[Any], count: int, what: str) -> None:
    _array(found, np.int32, (len(found),), f"positions of {what}")
    if len(found) and (found[0] < 0 or found[-1] >= count or (np.diff(found) <= 0).any()):
        raise ValueError(f"positions of {what} that do not rise within the prompt")


def _array(found: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(found, np.ndarray) or found.dtype != dtype or found.shape != shape:
        raise ValueError(f"{what} of another type or shape")


def _finite(found: npt.NDArray[Any], what: str, low: float | None = None) -> None:
    if not np.isfinite(found).all() or (low is not None and (found < low).any()):
        raise ValueError(f"{what} that are no numbers")
