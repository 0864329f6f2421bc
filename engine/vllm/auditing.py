"""One request again, blended and with full prefill, on vLLM's model: how far apart they are."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from cache_store.errors import CacheblendError
from engine.audit import Audit
from engine.blend import Blended, Ending, blend
from engine.compare import FORCED_TOKENS, Agreement, agreement, reference
from engine.forward import forward
from engine.loaders import DamagedSource, LayerLoader
from engine.results import Audited, ModelInfo
from engine.timing import Stopwatch
from engine.vllm.lockstep import LostSources, together
from engine.vllm.plan import AuditPlan
from engine.vllm.worker import BlendWorker


@dataclass(frozen=True)
class _Tokens:
    """Of a run, what an audit's record has."""

    cached_tokens: int
    selected: tuple[int, ...]


class Auditor:
    """Audits what a worker has blended, in KV of its own: vLLM's blocks are not touched."""

    def __init__(self, worker: BlendWorker, info: ModelInfo, audit: Audit) -> None:
        self._worker, self._info, self._audit = worker, info, audit

    @torch.inference_mode()
    def __call__(self, plan: AuditPlan) -> Audited:
        """Logs it too, once for all ranks. Raises CacheblendError where its KV is gone, or the log
        fails."""
        ranks = self._worker.model.ranks
        try:
            blended, same = self._compared(plan)
        except (DamagedSource, LostSources) as error:
            raise CacheblendError("what it was blended from is no longer stored") from error
        found = Audited(same.kl_first, same.kl_mean, same.top1)
        if ranks.leads:
            request = plan.request
            cached = sum(len(s.segment.token_ids) for s in plan.sources if s.cached)
            ran = _Tokens(cached, blended.selected)
            record = self._audit.record(self._info, request.prompt, ran, request.options, found)
            self._audit.log.append(record)
        return found

    def _compared(self, plan: AuditPlan) -> tuple[Blended, Agreement]:
        worker, request, watch = self._worker, plan.request, Stopwatch()
        model, ids, end = worker.model, request.prompt.token_ids, request.end
        asked = request.question_tokens
        question = len(ids) - end if asked is None else asked
        capacity = min(len(ids) + FORCED_TOKENS, model.config.context)
        tables = model.rope.tables(len(ids), capacity)
        cache = model.new_cache(capacity)
        with ExitStack() as stack:

            def prepare() -> LayerLoader:
                stack.enter_context(worker.pinned(plan.sources))
                return stack.enter_context(worker.loader(request.options, plan.sources, watch))

            loader = together(model.ranks, prepare)

            def blends() -> Blended:
                return blend(
                    *(model, ids[: end + question], plan.sources, loader, request.options),
                    *(cache, tables, watch, Ending(question, lambda layer: None)),
                )

            blended = together(model.ranks, blends, loader.troubles)

        def compares() -> Agreement:
            cache.length = end  # the suffix is computed over it, as vLLM does
            logits = forward(model, cache, ids[end:], tables)
            full = reference(model, ids, model.config.eos_ids, capacity)
            return agreement(model, cache, tables, logits, full)

        return blended, together(model.ranks, compares)
