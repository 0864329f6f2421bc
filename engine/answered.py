"""A run and its answer, as one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache_store.misses import MissReason
from engine.compare import Agreement, first_divergence
from engine.generate import Generated
from engine.options import BlendOptions
from engine.prefill import PrefillRun
from engine.prompt import Prompt
from engine.results import (
    AskResult,
    Audited,
    Comparison,
    FirstToken,
    KVRecord,
    ModelInfo,
    PromptRecord,
    Recomputed,
    SegmentRecord,
    Timing,
)
from engine.sources import Source
from engine.trace.record import Trace
from engine.trace.recorder import Recorder
from engine.trace.recording import Happened

TOP_LOGPROBS = 10


@dataclass(frozen=True)
class Against:
    """Full prefill of the same prompt, and how the run agrees with it. tokens: its greedy ones that
    were forced on both; plain: its own answer; span: when all that began and ended, by
    `time.perf_counter`."""

    ttft_s: float
    tokens: tuple[int, ...]
    same: Agreement
    plain: Generated
    span: tuple[float, float]

    def comparison(self, run: PrefillRun, answer: Generated) -> Comparison:
        return Comparison(
            self.ttft_s,
            self.ttft_s / run.ttft_s,
            self.same.kl_first,
            self.same.kl_mean,
            self.same.top1,
            first_divergence(answer.token_ids, self.plain.token_ids),
            self.plain.text,
        )


@dataclass(frozen=True)
class Done:
    """A prompt that was answered. began: when work on it began; decode: when its answer did and
    ended, by `time.perf_counter`."""

    run: PrefillRun
    answer: Generated
    began: float
    decode: tuple[float, float]
    against: Against | None = None
    recorder: Recorder | None = None

    @property
    def happened(self) -> Happened:
        """As a trace is made of it."""
        answer, against = self.answer.token_ids, self.against
        if against is None:
            return Happened(answer, self.decode)
        plain, same = against.plain.token_ids, against.same
        return Happened(answer, self.decode, against.span, plain, against.tokens, same.kl)


@dataclass(frozen=True)
class Beside:
    """What there is of an answered prompt besides its run and answer. reasons: one a segment, of a
    miss; load_s, total_s: seconds that loading the model and all of it took."""

    reasons: Sequence[MissReason | None]
    compare: Comparison | None
    audit: Audited | None
    notes: tuple[str, ...]
    trace: Trace | None
    load_s: float
    total_s: float


def answered(
    engine: str,
    info: ModelInfo,
    prompt: Prompt,
    options: BlendOptions,
    run: PrefillRun,
    answer: Generated | None,
    beside: Beside,
) -> AskResult:
    """The result, its trace completed. engine: its name; answer: None where it isn't known."""
    blending, watch = options.mode == "blend", run.watch
    result = AskResult(
        answer=answer.text if answer else "",
        finish_reason=answer.finish_reason if answer else "unknown",
        output_token_ids=answer.token_ids if answer else (),
        model=info,
        mode=options.mode,
        policy=options.policy,
        ratios=tuple(float(ratio) for ratio in options.ratios) if blending else (),
        threshold=None if options.threshold is None else float(options.threshold),
        transfer=options.transfers,
        check_layers=options.check_layers if blending else (),
        skipped_blend=run.skipped,
        prompt=_prompt_record(prompt, run.used, beside.reasons),
        recomputed=Recomputed(
            len(run.selected),
            len(run.selected) / run.cached_tokens if run.cached_tokens else 0.0,
            run.per_layer,
        ),
        first_token=_first_token(run.logits[0], answer) if answer else None,
        timing=Timing(
            load_model_s=beside.load_s,
            tokenize_s=0.0,
            retrieve_s=0.0,
            ttft_s=run.ttft_s,
            kv_load_s=watch.load.seconds,
            kv_stall_s=watch.stall.seconds,
            rotate_s=watch.rotate.seconds,
            score_s=watch.score.seconds,
            recompute_s=watch.recompute.seconds,
            decode_s=answer.seconds if answer else 0.0,
            total_s=beside.total_s,
            layers=tuple(watch.layers),
        ),
        kv=KVRecord.of(run.tiers),
        compare=beside.compare,
        audit=beside.audit,
        selected=run.selected,
        notes=beside.notes,
        trace=beside.trace,
        engine=engine,
    )
    return result.timed(result.timing)


def _prompt_record(
    prompt: Prompt, sources: Sequence[Source], reasons: Sequence[MissReason | None]
) -> PromptRecord:
    return PromptRecord(
        prompt.token_ids,
        tuple(
            SegmentRecord(
                s.segment.kind,
                s.segment.chunk_id,
                s.segment.source,
                s.segment.start,
                s.segment.end,
                s.status,
                reason if s.status == "miss" else None,
            )
            for s, reason in zip(sources, reasons, strict=True)
        ),
    )


def _first_token(logits: torch.Tensor, answer: Generated) -> FirstToken:
    values, ids = logits.log_softmax(-1).topk(min(TOP_LOGPROBS, len(logits)))
    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return FirstToken(answer.first_id, pairs)
