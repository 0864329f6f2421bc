"""The scheduler's side: which requests name chunks, what of them is stored, what to load when."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cache_store.errors import CacheblendError
from cache_store.keys import KVSpec
from engine.lookups import account
from engine.lookups import notes as miss_notes
from engine.prompt import Prompt
from engine.rope import Rope
from engine.sources import KVStore, Source, find_sources
from engine.vllm.audits import AuditQueue
from engine.vllm.naming import PARAMETER, FindsChunks, RequestReader
from engine.vllm.plan import BlendPlan, RequestPlan, StepPlan
from engine.vllm.salt import Salt
from engine.vllm.saves import SaveQueue
from engine.vllm.separators import Separator
from engine.vllm.settings import ConnectorSettings
from engine.vllm.summary import RunSummary, segments_of
from engine.vllm.text import one_line

FRESH = 2.0
"""Seconds after which a waiting request's chunks are looked up again."""
_OWED = 4096  # requests that ended before their blend's result was here
_OVER = 1024  # summaries that nobody took


@dataclass
class _Live:
    """A request that is not finished. left: why it is left to vLLM altogether."""

    plan: RequestPlan
    left: str | None = None
    salt: str = ""
    sources: tuple[Source, ...] = ()
    found_at: float | None = None
    why: str | None = None  # it was not blended, the last time it was scheduled
    held: int = 0
    blending: bool = False  # the result of its blend is not here yet
    ran: bool = False
    summary: RunSummary | None = None


class BlendScheduler:
    """Decides, request by request. Knows vLLM's request only by its fields.

    A request that names no chunk, or names them wrongly, or is of a kind that can't be blended, is
    left to vLLM. Nothing that a request says, and no trouble with the store, raises here: vLLM's
    engine would end.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        store: KVStore,
        spec: KVSpec,
        rope: Rope,
        separator: Separator | None,
        *,
        stored: FindsChunks | None = None,
        context: tuple[int, ...] | None = None,
        audits: AuditQueue | None = None,
        idles: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """separator, stored: see `RequestReader`. context: what chunks are computed behind; None:
        their prompt's prefix. idles: see `SaveQueue`."""
        self.settings, self.store, self.spec = settings, store, spec
        self.rope = rope
        self._reader = RequestReader(settings, spec.layers, separator or None, stored)
        self.warnings: list[str] = []
        self.refused = 0  # requests that name their chunks wrongly
        self.saves = SaveQueue(context, idles=idles)
        self.audits = AuditQueue(None) if audits is None else audits
        self._salt = Salt(spec.layers, f"{settings.store} {spec}")
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._owed: OrderedDict[str, tuple[_Live, dict[str, Any]]] = OrderedDict()
        self._over: deque[RunSummary] = deque(maxlen=_OVER)
        self._blends: list[BlendPlan] = []
        self._step_tokens = 0

    def arrived(self, request: Any) -> RequestPlan | None:
        """Learns of a new request. Where it is to be blended, its blocks are set apart from those
        of plain requests, and of requests that are blended otherwise."""
        try:
            plan = self._reader.read(
                request.request_id, request.prompt_token_ids or (), request.kv_transfer_params
            )
            if plan is None:
                return None
            if (other := _other_kind(request)) is not None:
                if PARAMETER in (request.kv_transfer_params or {}):
                    self._warn(request, f"{other}; it is not blended")
                return None
            left = _left(request, plan)
            salt = ""
            if left is None:
                salt = request.cache_salt = self._salt(plan, request.cache_salt)
                request.block_hashes.clear()
                request.update_block_hashes()
        except Exception as error:
            self._warn(request, f"{_said(error)}; it is not blended")
            self.refused += 1
            return None
        self._live[request.request_id] = _Live(plan, left, salt)
        if left is None:
            self._look_ahead(plan.prompt)
        return plan

    def matched(self, request: Any, held: int) -> int | None:
        """How many tokens after the first `held` ones come from stored KV; None: not in this step,
        which has enough to blend.

        To be asked again for a request that could not be scheduled then.
        """
        live = self._live.get(request.request_id)
        if live is None or live.left is not None:
            return 0
        plan, live.held, live.why = live.plan, held, None
        if held >= plan.end:
            return 0
        try:
            self._find(live)
            live.why = self._why_not(live)
        except Exception as error:
            live.why = f"the store could not be asked: {_said(error)}"
            self._warn(request, live.why)
        if live.why is not None:
            return 0
        if self._step_tokens and self._step_tokens + plan.end > self.settings.step_tokens:
            return None
        return plan.end - held

    def allocated(self, request: Any, block_ids: Sequence[int], loaded: int) -> None:
        """vLLM has made room for a request. loaded: what `matched` said of it; 0 where vLLM made
        nothing of that."""
        live = self._live.get(request.request_id)
        if live is None:
            return
        live.ran, live.found_at = True, None
        if loaded:
            self._step_tokens += live.plan.end
            live.blending, live.held = True, live.plan.end - loaded
            plan = BlendPlan(live.plan, live.sources, tuple(block_ids), live.held, live.salt)
            self._blends.append(plan)

    def step(self, *, busy: bool) -> StepPlan:
        """What the workers are to do in the step that begins now. busy: requests run in it."""
        saves, audits = self.saves.take(busy=busy), self.audits.take(busy=busy)
        plan = StepPlan(tuple(self._blends), saves, audits)
        self._blends, self._step_tokens = [], 0
        return plan

    def results(self, summaries: Sequence[RunSummary]) -> None:
        """Takes what the workers did in a step. What a request that ended in it is to report is
        filled in here."""
        for summary in summaries:
            live = self._live.get(summary.request_id)
            if live is not None:
                live.summary, live.blending = summary, False
                continue
            owed = self._owed.pop(summary.request_id, None)
            if owed is not None:
                live, report = owed
                live.summary, live.blending = summary, False
                self._report(live, report)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended. What it missed is stored from now on.

        Returns what its client is told, under "cacheblend"; None for a request that names no
        chunks. Where a result is still to come, it is filled in by `results`.
        """
        live = self._live.pop(request.request_id, None)
        if live is None:
            return None
        report: dict[str, Any] = {}
        ended = getattr(request.status, "name", "")
        live.ran = live.ran and ended != "FINISHED_ERROR"
        if live.blending:
            self._owed[request.request_id] = live, report
            while len(self._owed) > _OWED:
                self._owed.popitem(last=False)
        else:
            self._report(live, report)
        return {PARAMETER: report}

    def take_summaries(self) -> list[RunSummary]:
        """Those of requests that have ended since the last time, the latest ones only."""
        taken = list(self._over)
        self._over.clear()
        return taken

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted though no request runs."""
        return bool(self.saves or self.audits)

    @property
    def idle(self) -> bool:
        """Whether nothing is kept of any request."""
        return not (self._live or self._owed or self._blends)

    def _look_ahead(self, prompt: Prompt) -> None:
        chunks = [s.token_ids for s in prompt.segments if s.kind in ("prefix", "chunk")]
        try:
            self.store.look_ahead(self.spec, chunks)
        except Exception as error:
            self.warnings.append(f"the store could not be asked: {_said(error)}")

    def _find(self, live: _Live) -> None:
        now = self._clock()
        if live.found_at is not None and now - live.found_at < FRESH:
            return
        prompt, options = live.plan.prompt, live.plan.options
        regime = self.rope.regime(len(prompt.token_ids))
        live.sources = find_sources(
            *(prompt, self.store, self.spec, regime, options.mode, options.strict_context)
        )
        live.found_at = now

    def _why_not(self, live: _Live) -> str | None:
        """Why a request is not to be blended with what was found, None where it is."""
        options = live.plan.options
        cached = _tokens(live.sources, cached=True)
        if not cached:
            return "nothing of it is stored"
        if options.mode == "blend" and cached < options.min_tokens:
            return f"{cached} cached tokens; blending begins at {options.min_tokens}"
        missing = _tokens(live.sources, cached=False)
        if missing > self.settings.step_tokens:
            return (
                f"{missing} tokens of missed chunks are more than one step computes "
                f"({self.settings.step_tokens})"
            )
        if options.indices is not None:
            places = {p for s in live.sources if s.cached for p in _places(s)}
            if outside := sorted(set(options.indices) - places):
                return f"position {outside[0]} is not a cached token of this prompt"
        return None

    def _report(self, live: _Live, report: dict[str, Any]) -> None:
        """Ends a request: counts what it found, queues what it missed, fills in its report."""
        summary = live.summary or self._plain(live)
        try:
            summary = self._accounted(live, summary)
        except Exception as error:
            self.warnings.append(f"the store could not be told of a prompt: {_said(error)}")
        if summary.outcome == "blended":
            try:
                self.audits.offer(live.plan, live.sources)
            except CacheblendError as error:
                self.warnings.append(f"a prompt could not be audited: {_said(error)}")
        self._over.append(summary)
        report.update(summary.to_json())

    def _accounted(self, live: _Live, summary: RunSummary) -> RunSummary:
        plan, saving, reasons = live.plan, 0, None
        sources = live.sources
        if live.ran and not sources and live.summary is None and live.left is not None:
            self._find(live)  # vLLM computed it without our looking
            sources = live.sources
        statuses = [s.status for s in summary.segments] or [s.status for s in sources]
        missed = [
            source.segment
            for source, status in zip(sources, statuses, strict=True)
            if "miss" in (source.status, status)
        ]
        if live.ran and sources:
            reasons = account(self.store, self.spec, sources, strict=plan.options.strict_context)
        may = plan.save and live.ran and not self.store.read_only
        if may:
            saving = self.saves.add(plan.prompt.prefix_ids, missed)
        if reasons is None:
            return summary
        segments = (
            tuple(
                replace(segment, reason=reason) if segment.status == "miss" else segment
                for segment, reason in zip(summary.segments, reasons, strict=True)
            )
            if summary.segments
            else ()
        )
        notes = summary.notes + miss_notes(reasons, saved=may)
        return replace(summary, segments=segments, notes=notes, saving=saving)

    def _plain(self, live: _Live) -> RunSummary:
        """Of a request that vLLM computed, or that never ran."""
        plan = live.plan
        held = live.left is None and live.held >= plan.end
        return RunSummary(
            request_id=plan.request_id,
            outcome="held" if held else "full",
            options=plan.options,
            segments=() if held else segments_of([s.computed() for s in live.sources]),
            prompt_tokens=len(plan.prompt.token_ids),
            held=live.held,
            why=live.left or live.why,
        )

    def _warn(self, request: Any, text: str) -> None:
        self.warnings.append(f"request {one_line(request.request_id)}: {text}")


def _other_kind(request: Any) -> str | None:
    """What makes a request one that is none of ours, None where it is text and nothing else."""
    kinds = {
        "prompt_embeds": "its prompt is given as embeddings",
        "prompt_is_token_ids": "its prompt is given as embeddings",
        "mm_features": "its prompt is multimodal",
        "lora_request": "it uses a LoRA adapter",
        "pooling_params": "it asks for pooling",
        "resumable": "its input is streamed",
    }
    for name, why in kinds.items():
        value = getattr(request, name, None)
        if value is not None and value is not False and value != []:
            return why
    return None


def _left(request: Any, plan: RequestPlan) -> str | None:
    """Why vLLM computes a request altogether, None where it may be blended."""
    if plan.options.computes_all:
        return "all of it is to be computed"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it asks for what only computing gives, as log-probabilities of the prompt"
    return None


def _said(error: Exception) -> str:
    if isinstance(error, CacheblendError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}"


def _places(source: Source) -> range:
    return range(source.segment.start, source.segment.end)


def _tokens(sources: Sequence[Source], *, cached: bool) -> int:
    """Of chunks whose KV is stored, or is not."""
    chunks = (s for s in sources if s.segment.kind == "chunk" and s.cached == cached)
    return sum(len(_places(s)) for s in chunks)
