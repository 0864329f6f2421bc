"""A run's trace, made from what its parts kept; after the answer, outside every time measured."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache_store.keys import chunk_id
from engine import bound
from engine.prefill import PrefillRun
from engine.trace.record import (
    AnswerToken,
    Deviations,
    Floats,
    Ints,
    Level,
    Phase,
    Stage,
    TokenTable,
    Trace,
)
from engine.trace.spans import spans_of

if TYPE_CHECKING:
    import torch

    from engine.config import ModelConfig
    from engine.options import BlendOptions
    from engine.prompt import Prompt, Segment
    from engine.results import Timing
    from engine.tokenizer import Tokenizer

_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Happened:
    """What came after the prefill. answer, plain: token ids of this run's and of full prefill's
    answer; forced: those that `kl` was taken along; decode, compare: [began, ended) in seconds of
    `time.perf_counter`."""

    answer: Sequence[int]
    decode: tuple[float, float]
    compare: tuple[float, float] | None = None
    plain: Sequence[int] = ()
    forced: Sequence[int] = ()
    kl: Sequence[float] = ()
    deviations: Deviations | None = None


def make_trace(
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompt: Prompt,
    options: BlendOptions,
    run: PrefillRun,
    happened: Happened,
    *,
    level: Level,
    question: str,
) -> Trace:
    """The trace of a run, but for its result and what was before the prefill: see `completed`."""
    created = time.time()
    stages = tuple(
        Stage(layer, _whole(positions), _floats(scores), count)
        for (layer, positions, scores), count in zip(run.scores, run.chosen, strict=True)
    )
    everything = options.mode == "full" or run.skipped is not None or options.computes_all
    attention = None
    if run.looks is not None:
        amounts = _floats(run.looks.amounts)
        attention = amounts / np.maximum(amounts.sum(1, keepdims=True), np.float32(1e-30))
    need = bound.of_run(config, run, options).total
    return Trace(
        id=datetime.fromtimestamp(created, UTC).strftime("%Y%m%dT%H%M%S.%f-")
        + secrets.token_hex(2),
        created=created,
        level=level,
        question=question,
        result={},
        layers=config.layers,
        tokens=_table(tokenizer, prompt, computed_layers(run, stages, config.layers, everything)),
        stages=stages,
        spans=spans_of(run.watch, run.began, config.layers),
        phases=_phases(run, happened),
        answer=_answer(tokenizer, happened.answer, happened),
        reference=_answer(tokenizer, happened.plain, happened),
        attention_layers=tuple(run.looks.layers) if run.looks is not None else (),
        attention_positions=None if run.looks is None else np.array(run.looks.positions, np.int32),
        attention=attention,
        deviations=happened.deviations,
        reuse_ttft_s=run.ttft_s if options.mode == "reuse" else None,
        bound=need / bound.full_prefill(config, len(prompt.token_ids)).total,
    )


def phases_before(timing: Timing) -> tuple[Phase, ...]:
    """What was before the prefill, one right after the other."""
    parts = (
        ("open", timing.load_model_s),
        ("retrieve", timing.retrieve_s),
        ("tokenize", timing.tokenize_s),
    )
    at = -sum(seconds for _, seconds in parts)
    found = []
    for name, seconds in parts:
        if seconds:
            found.append(Phase(name, at, at + seconds))
        at += seconds
    return tuple(found)


def computed_layers(
    run: PrefillRun, stages: Sequence[Stage], layers: int, everything: bool
) -> npt.NDArray[np.int16]:
    """In how many layers each token was computed, int16 [N]."""
    count = sum(len(source.segment.token_ids) for source in run.used)
    computed = np.full(count, layers if everything else 0, np.int16)
    if everything:
        kept = (source.segment for source in run.used if source.status == "kept")
        computed[: max((segment.end for segment in kept), default=0)] = 0
        return computed
    hits = np.zeros(count, bool)
    for source in run.used:
        place = slice(source.segment.start, source.segment.end)
        if source.status in ("computed", "miss"):
            computed[place] = layers
        elif source.status == "hit":
            hits[place] = True
    # The tokens only become fewer: each layer has the next set of so many.
    sets: list[npt.NDArray[Any]]
    sets = [np.flatnonzero(hits), *(stage.selected() for stage in stages), np.array([], np.intp)]
    for tokens in run.per_layer:
        while len(sets) > 1 and len(sets[0]) != tokens:
            sets.pop(0)
        computed[sets[0]] += 1
    return computed


def _table(tokenizer: Tokenizer, prompt: Prompt, computed: npt.NDArray[np.int16]) -> TokenTable:
    pieces = [piece for segment in prompt.segments for piece in _pieces(tokenizer, segment)]
    ends = np.cumsum([len(piece) for piece in pieces]).astype(np.int32)
    return TokenTable(np.array(prompt.token_ids, np.int32), b"".join(pieces), ends, computed)


def _pieces(tokenizer: Tokenizer, segment: Segment) -> list[bytes]:
    """The bytes of a segment's tokens. Where a chunk's own text tells whether a space in front is
    the tokenizer's or its own, it decides."""
    shown = tokenizer.pieces(segment.token_ids)
    if segment.chunk_id is None or _names(segment.chunk_id, shown):
        return shown
    whole = tokenizer.pieces(segment.token_ids, whole=True)
    bare = [whole[0].removeprefix(b" "), *whole[1:]]
    return next((pieces for pieces in (whole, bare) if _names(segment.chunk_id, pieces)), shown)


def _names(name: str, pieces: Sequence[bytes]) -> bool:
    return chunk_id(b"".join(pieces).decode("utf-8", "replace")) == name


def _phases(run: PrefillRun, happened: Happened) -> tuple[Phase, ...]:
    watch, began = run.watch, run.began
    first = watch.starts[0]
    read = watch.reads.get(0, first)
    parts: list[tuple[str, float, float]] = [
        ("find", began, read),
        ("read question", read, first),
        ("layers", first, watch.logits),
        ("logits", watch.logits, began + run.ttft_s),
        ("compare", *(happened.compare or (0.0, 0.0))),
        ("decode", *happened.decode),
    ]
    return tuple(Phase(name, a - began, b - began) for name, a, b in parts if b > a)


def _answer(
    tokenizer: Tokenizer, ids: Sequence[int], happened: Happened
) -> tuple[AnswerToken, ...]:
    """KL is known as long as the tokens before are those it was taken along."""
    along = 0
    while along < min(len(ids), len(happened.forced)) and ids[along] == happened.forced[along]:
        along += 1
    known = min(along + 1, len(happened.kl))
    kl = [*happened.kl[:known], *[None] * len(ids)]
    return tuple(
        AnswerToken(token, text, kl[index])
        for index, (token, text) in enumerate(zip(ids, tokenizer.token_spans(ids), strict=True))
    )


def _whole(values: torch.Tensor) -> Ints:
    return values.cpu().numpy().astype(np.int32)


def _floats(values: torch.Tensor) -> Floats:
    """float32, finite; what is not a number is as high as can be, as selecting takes it."""
    numbers = values.float().cpu().numpy()
    made: Floats = np.nan_to_num(numbers, nan=_MOST, posinf=_MOST, neginf=-_MOST)
    return made


def completed(trace: Trace, result: Mapping[str, Any], timing: Timing) -> Trace:
    """The trace with its result, and with what was before the prefill."""
    after = tuple(phase for phase in trace.phases if phase.start_s >= 0)
    return replace(trace, result=result, phases=phases_before(timing) + after)
