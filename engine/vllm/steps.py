"""Carries out the scheduler's plans on a worker; nothing that goes wrong there ends the engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from cache_store.errors import CacheblendError
from engine.options import BlendOptions
from engine.results import Audited
from engine.sources import Source
from engine.vllm.metrics import Tally
from engine.vllm.plan import AuditPlan, BlendPlan, SavePlan, StepPlan
from engine.vllm.summary import RunSummary, Seconds, segments_of
from engine.vllm.text import one_line
from engine.vllm.tracing import RunListener
from engine.vllm.worker import BlendRun

PATIENCE = 30.0
"""Seconds after a failed save in which no other is tried: a full disk stays full for a while."""
WEIGHTS_CHANGED = "the model's weights have changed: blending is off until a restart"


class Worker(Protocol):
    """What is needed of `engine.vllm.worker.BlendWorker`."""

    def blend(self, plan: BlendPlan) -> BlendRun: ...

    def save(self, plan: SavePlan) -> int: ...

    def agreed(self, yes: bool) -> bool: ...


@dataclass(frozen=True)
class StepResult:
    """What became of a `StepPlan`. failed_blocks: they hold no KV, and vLLM computes it."""

    summaries: tuple[RunSummary, ...] = ()
    failed_blocks: frozenset[int] = frozenset()


class Tails(Protocol):
    """What is needed of `engine.vllm.tails.TailedKV`."""

    def keep(self, plan: BlendPlan) -> None: ...

    def restore(self, plan: BlendPlan) -> bool: ...

    def forget(self, plan: BlendPlan) -> None: ...


class StepRunner:
    """warn: takes a line for the log. worker: None where this one can't blend. off: why it may no
    longer: what is to be blended is computed, and nothing is saved. asleep: nothing is saved
    meanwhile. Both are set on all ranks alike."""

    def __init__(
        self,
        worker: Worker | None,
        block_size: int,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.block_size = worker, block_size
        self.off: str | None = None
        self.asleep = False
        self.listeners: list[RunListener] = []
        self.tails: Tails | None = None
        self.tally = Tally()
        self.auditor: Callable[[AuditPlan], Audited] | None = None
        self.warn, self._clock = warn, clock
        self._resting_until = 0.0

    def blend(self, plan: StepPlan) -> StepResult:
        """To be called before vLLM's forward, which reads what is blended here."""
        summaries: list[RunSummary] = []
        failed: set[int] = set()
        for wanted in plan.blends:
            try:
                summaries.append(self._blend(wanted))
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error)}"
                name = wanted.request.request_id
                self.warn(f"request {name}: not blended, vLLM computes it: {why}")
                failed.update(wanted.block_ids[wanted.held // self.block_size :])
                summaries.append(_failed(wanted, why))
        return StepResult(tuple(summaries), frozenset(failed))

    def save(self, plan: StepPlan) -> None:
        """To be called when the forward is done."""
        for wanted in plan.saves:
            if self._rests:
                return
            if self.worker is None or self.worker.agreed(self._clock() < self._resting_until):
                return
            try:
                self.tally.add("saved_chunks", self.worker.save(wanted))
            except Exception as error:
                self.tally.add("failures", 1, "save")
                self._resting_until = self._clock() + PATIENCE
                self.warn(f"not every new chunk was stored: {one_line(error)}")

    def audit(self, plan: StepPlan) -> None:
        """To be called last: nothing waits for it."""
        for wanted in plan.audits:
            if self.auditor is None or self._rests:
                return
            try:
                self.tally.observe("audit_kl", self.auditor(wanted).kl_mean)
            except Exception as error:  # torch's word for no memory left is a RuntimeError
                self.tally.add("failures", 1, "audit")
                self.warn(f"a prompt could not be audited: {one_line(error)}")

    def weights_changed(self) -> None:
        """What is stored, or kept of blends, is of other weights."""
        if self.off is None:
            self.warn(WEIGHTS_CHANGED)
        self.off = WEIGHTS_CHANGED

    @property
    def _rests(self) -> bool:
        return self.asleep or self.off is not None

    def _blend(self, plan: BlendPlan) -> RunSummary:
        if self.worker is None:
            raise CacheblendError("this worker has no model to blend with")
        if self.off is not None:
            return self._computed(plan, self.off)
        if self.tails is not None and self.tails.restore(plan):
            return _held(plan)
        try:
            run = self.worker.blend(plan)
            if self.tails is not None:
                self.tails.keep(plan)
            for listener in self.listeners:
                listener.ran(run)
            return summary_of(run)
        except Exception as error:
            for listener in self.listeners:
                listener.failed(plan, error)
            why = f"{type(error).__name__}: {one_line(error)}"
            self.warn(f"request {plan.request.request_id}: not blended, but computed: {why}")
        return self._computed(plan, why)

    def _computed(self, plan: BlendPlan, why: str) -> RunSummary:
        """Done here and now, for vLLM may have begun to schedule what comes after it."""
        assert self.worker is not None
        if self.tails is not None:
            self.tails.forget(plan)
        summary = summary_of(self.worker.blend(computed(plan)))
        return replace(summary, outcome="failed", options=plan.request.options, why=why)


def computed(plan: BlendPlan) -> BlendPlan:
    """The same without any stored KV, and nothing to select."""
    sources = tuple(Source(source.segment, "computed") for source in plan.sources)
    options = BlendOptions.of(mode="reuse", loader=plan.request.options.loader)
    request = replace(plan.request, options=options, trace=None, question_tokens=0)
    return replace(plan, request=request, sources=sources)


def summary_of(run: BlendRun) -> RunSummary:
    plan, watch, prompt = run.plan, run.watch, run.plan.request.prompt
    return RunSummary(
        request_id=plan.request.request_id,
        outcome="blended",
        options=plan.request.options,
        segments=segments_of(run.sources),
        prompt_tokens=len(prompt.token_ids),
        end=plan.request.end,
        held=plan.held,
        recomputed=len(run.blended.selected),
        per_layer=run.blended.per_layer,
        selected=run.blended.selected,
        seconds=Seconds(
            load=watch.load.seconds,
            stall=watch.stall.seconds,
            rotate=watch.rotate.seconds,
            score=watch.score.seconds,
            recompute=watch.recompute.seconds,
            total=run.seconds,
        ),
        tiers=tuple(run.tiers.items()),
        notes=run.notes,
    )


def _held(plan: BlendPlan) -> RunSummary:
    return RunSummary(
        request_id=plan.request.request_id,
        outcome="held",
        options=plan.request.options,
        segments=(),
        prompt_tokens=len(plan.request.prompt.token_ids),
        end=plan.request.end,
        held=plan.request.end,
    )


def _failed(plan: BlendPlan, why: str) -> RunSummary:
    return RunSummary(
        request_id=plan.request.request_id,
        outcome="failed",
        options=plan.request.options,
        segments=segments_of([source.computed() for source in plan.sources]),
        prompt_tokens=len(plan.request.prompt.token_ids),
        held=plan.held,
        why=why,
    )
