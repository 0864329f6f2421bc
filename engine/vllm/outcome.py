"""What became of a request in vLLM, as a run of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cache_store.keys import KVSpec
from engine.model import Decoder
from engine.prefill import PrefillRun, too_few
from engine.sources import KVStore, Source, find_sources
from engine.timing import Stopwatch
from engine.vllm.request import LocalRequest
from engine.vllm.worker import BlendRun


def outcome(
    request: LocalRequest, store: KVStore | None, spec: KVSpec, model: Decoder
) -> PrefillRun:
    """The run of a request whose first token is there. What vLLM itself computed, its scheduling
    included, counts as recomputing."""
    if request.blend is not None:
        return _blended(request, request.blend)
    return _plain(request, store, spec, model)


def _blended(request: LocalRequest, run: BlendRun) -> PrefillRun:
    first_at, watch = request.watched.first_at, run.watch
    watch.recompute.add(max(0.0, first_at - watch.logits))
    made = of_blend(run)
    return replace(
        made,
        logits=request.watched.rows[0][None],
        ttft_s=first_at - request.began,
        began=request.began,
    )


def of_blend(run: BlendRun) -> PrefillRun:
    """A blend by itself: its time ends where its KV is there, and there are no logits."""
    watch, result = run.watch, run.blended
    return PrefillRun(
        logits=result.logits,
        found=run.sources,
        used=run.sources,
        cached_tokens=_cached(run.sources),
        selected=result.selected,
        per_layer=result.per_layer,
        skipped=None,
        bytes_loaded=run.bytes_loaded,
        tiers=run.tiers,
        ttft_s=run.seconds,
        watch=watch,
        notes=run.notes,
        began=watch.began,
        scores=result.scores,
        chosen=result.chosen,
        looks=result.looks,
    )


def _plain(
    request: LocalRequest, store: KVStore | None, spec: KVSpec, model: Decoder
) -> PrefillRun:
    """vLLM has computed the whole prompt."""
    prompt, options = request.prompt, request.options
    regime = model.rope.regime(len(prompt.token_ids))
    found = find_sources(prompt, store, spec, regime, options.mode, options.strict_context)
    cached = _cached(found)
    skipped = too_few(options, cached)
    notes: tuple[str, ...] = ()
    if request.failure is not None:
        said = str(request.failure) or type(request.failure).__name__
        skipped = f"stored KV could not be used, so vLLM computed the whole prompt: {said}"
        notes = (skipped,)
    selected: tuple[int, ...] = ()
    if options.computes_all and not skipped:
        selected = tuple(
            p for s in found if s.cached for p in range(s.segment.start, s.segment.end)
        )
    used = found if selected else tuple(source.computed() for source in found)
    watch = Stopwatch()
    first_at = watch.logits = request.watched.first_at
    watch.began = request.began
    watch.starts.update(request.starts)
    watch.recompute.add(first_at - request.began)
    return PrefillRun(
        logits=request.watched.rows[0][None],
        found=found,
        used=used,
        cached_tokens=cached,
        selected=selected,
        per_layer=(len(selected),) * model.config.layers,
        skipped=skipped,
        bytes_loaded=0,
        tiers={},
        ttft_s=first_at - request.began,
        watch=watch,
        notes=notes,
        began=request.began,
    )


def _cached(sources: Sequence[Source]) -> int:
    return sum(s.segment.end - s.segment.start for s in sources if s.cached)
