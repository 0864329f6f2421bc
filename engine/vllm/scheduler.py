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
from engine.rope import Rope
from engine.sources import KVStore, Source
from engine.vllm.admission import left_to_vllm, not_worth_it, other_kind
from engine.vllm.audits import AuditQueue
from engine.vllm.lookup import Found, Lookups
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
PATIENCE = 10.0
"""Seconds that a request waits for what a remote store has of it."""
COUNTED = 10.0
"""Seconds between two writings of what was counted."""
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
    lookup: Found | None = None  # that is not through yet, begun at asked_at
    asked_at: float = 0.0

    def drop_lookup(self) -> None:
        if self.lookup is not None:
            self.lookup.cancel()
        self.lookup = None


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
        self._reader = RequestReader(settings, spec.layers, separator or None, stored)
        self.warnings: list[str] = []
        self.refused = 0  # requests that name their chunks wrongly
        self.saves = SaveQueue(context, idles=idles)
        self.audits = AuditQueue(None) if audits is None else audits
        self._salt = Salt(spec.layers, f"{settings.store} {spec}")
        background = settings.remote is not None
        self._lookups = Lookups(lambda: self.store, spec, rope, background=background)
        self._clock, self._counted_at = clock, clock()
        self._live: dict[str, _Live] = {}
        self._owed: OrderedDict[str, tuple[_Live, dict[str, Any]]] = OrderedDict()
        self._over: deque[RunSummary] = deque(maxlen=_OVER)
        self._blends: list[BlendPlan] = []
        self._step_tokens = 0
        self._damaged = len(store.damaged)  # entries that were told of

    def use(self, store: KVStore, loader: str) -> None:
        """For requests that arrive from now on."""
        self.store, self._damaged = store, len(store.damaged)
        blend = replace(self.settings.blend, loader=loader)
        self.settings = self._reader.settings = replace(self.settings, blend=blend)

    def arrived(self, request: Any) -> RequestPlan | None:
        """Learns of a new request. Where it is to be blended, its blocks are set apart from those
        of plain requests, and of requests that are blended otherwise."""
        try:
            plan = self._reader.read(
                request.request_id, request.prompt_token_ids or (), request.kv_transfer_params
            )
            if plan is None:
                return None
            if (other := other_kind(request)) is not None:
                if PARAMETER in (request.kv_transfer_params or {}):
                    self._warn(request, f"{other}; it is not blended")
                return None
            left = left_to_vllm(request, plan)
            salt = ""
            if left is None:
                salt = request.cache_salt = self._salt(plan, request.cache_salt)
                request.block_hashes.clear()
                request.update_block_hashes()
        except Exception as error:
            self._warn(request, f"{_said(error)}; it is not blended")
            self.refused += 1
            return None
        live = self._live[request.request_id] = _Live(plan, left, salt)
        if self._lookups.background:
            live.lookup, live.asked_at = self._lookups.begin(plan), self._clock()
        return plan

    def matched(self, request: Any, held: int) -> int | None:
        """How many tokens after the first `held` ones come from stored KV; None: not in this step,
        which has enough to blend, or comes before it is known.

        To be asked again for a request that could not be scheduled then.
        """
        live = self._live.get(request.request_id)
        if live is None or live.left is not None:
            return 0
        plan, live.held, live.why = live.plan, held, None
        if held >= plan.end:
            return 0
        try:
            if not self._look(live):
                return None
            live.why = not_worth_it(plan, live.sources, self.settings.step_tokens)
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
        self._hear()
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
        if live.left is None:
            live.drop_lookup()
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

    def close(self) -> None:
        """Ends its thread, if it has one; nothing may be asked after it."""
        self._lookups.close()

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted though no request runs."""
        return bool(self.saves or self.audits)

    @property
    def idle(self) -> bool:
        """Whether nothing is kept of any request."""
        return not (self._live or self._owed or self._blends)

    def _look(self, live: _Live) -> bool:
        """Looks up what is stored of a request, unless it is known; returns whether that is done.
        Raises whatever the store does."""
        now = self._clock()
        if live.found_at is not None and (self._lookups.background or now - live.found_at < FRESH):
            return True
        if live.lookup is None:
            live.lookup, live.asked_at = self._lookups.begin(live.plan), now
        if not live.lookup.done():
            if now - live.asked_at > PATIENCE:
                live.drop_lookup()
                raise CacheblendError("it did not answer in time")
            return False
        lookup, live.lookup = live.lookup, None
        live.sources, live.found_at = lookup.result(), now
        return True

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
            except Exception as error:
                self.warnings.append(f"a prompt could not be audited: {_said(error)}")
        self._over.append(summary)
        report.update(summary.to_json())

    def _accounted(self, live: _Live, summary: RunSummary) -> RunSummary:
        plan, saving, reasons = live.plan, 0, None
        sources = live.sources
        if live.ran and not sources and live.summary is None and live.left is not None:
            self._look(live)  # vLLM computed it without our asking
            sources = live.sources
        statuses = [s.status for s in summary.segments] or [s.status for s in sources]
        missed = [
            source.segment
            for source, status in zip(sources, statuses, strict=True)
            if "miss" in (source.status, status)
        ]
        if live.ran and sources:
            reasons = account(self.store, self.spec, sources, strict=plan.options.strict_context)
            if self._clock() - self._counted_at > COUNTED:
                self._counted_at = self._clock()
                self.store.counters.flush()
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

    def _hear(self) -> None:
        """What the store has to say: of entries that are damaged, of a remote that fails."""
        damaged = self.store.damaged
        told, self._damaged = damaged[self._damaged :], len(damaged)
        self.warnings += [one_line(said) for said in (*told, *self.store.take_notes())]

    def _warn(self, request: Any, text: str) -> None:
        self.warnings.append(f"request {one_line(request.request_id)}: {text}")


def _said(error: Exception) -> str:
    if isinstance(error, CacheblendError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}"
