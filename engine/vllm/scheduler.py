"""The scheduler's side: which requests name chunks, what of them is stored, what to load when."""

import hashlib
from collections.abc import Sequence
from typing import Any

from cache_store.errors import CacheblendError
from cache_store.keys import KVSpec
from engine.prompt import Prompt
from engine.rope import Rope
from engine.sources import KVStore, Source, find_sources
from engine.vllm.naming import PARAMETER, from_segments, from_separators, options_of
from engine.vllm.plan import BlendPlan, RequestPlan, SavePlan, StepPlan
from engine.vllm.settings import ConnectorSettings


class BlendScheduler:
    """Decides, request by request. Knows vLLM's request only by its fields.

    A request that names no chunk, or names them wrongly, is left to vLLM.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        store: KVStore,
        spec: KVSpec,
        rope: Rope,
        separator: Sequence[int],
    ) -> None:
        self.settings, self.store, self.spec = settings, store, spec
        self.rope, self.separator = rope, tuple(separator)
        self.warnings: list[str] = []
        self._plans: dict[str, RequestPlan] = {}  # of requests that are not finished
        self._found: dict[str, tuple[Source, ...]] = {}  # of those that wait
        self._blends: list[BlendPlan] = []
        self._saves: list[SavePlan] = []
        self._step_tokens = 0

    def arrived(self, request: Any) -> RequestPlan | None:
        """Learns of a new request. Where it is to be blended, its blocks are set apart from those
        of plain requests, and of requests that are blended otherwise."""
        try:
            plan = self._read(request)
        except (CacheblendError, KeyError, TypeError, ValueError) as error:
            self.warnings.append(f"request {request.request_id}: {error}; it is not blended")
            return None
        if plan is None:
            return None
        self._plans[request.request_id] = plan
        request.cache_salt = f"{self._salt(plan)}:{request.cache_salt or ''}"
        request.block_hashes.clear()
        request.update_block_hashes()
        return plan

    def matched(self, request: Any, held: int) -> int | None:
        """How many tokens after the first `held` ones come from stored KV; None: not in this step,
        which has enough to blend."""
        plan = self._plans.get(request.request_id)
        if plan is None or held >= plan.end:
            return 0
        found = self._found.get(request.request_id)
        if found is None:
            regime = self.rope.regime(len(plan.prompt.token_ids))
            options = plan.options
            found = find_sources(
                *(plan.prompt, self.store, self.spec, regime, options.mode, options.strict_context)
            )
            self._found[request.request_id] = found
        cached = sum(s.segment.end - s.segment.start for s in found if s.cached)
        if plan.options.computes_all or cached < max(plan.options.min_tokens, 1):
            return 0
        if self._step_tokens and self._step_tokens + cached > self.settings.step_tokens:
            return None
        return plan.end - held

    def allocated(self, request: Any, block_ids: Sequence[int], loaded: int) -> None:
        """vLLM has made room for a request whose KV is to be loaded before the next forward."""
        plan = self._plans.get(request.request_id)
        found = self._found.pop(request.request_id, None)
        if plan is None or found is None or not loaded:
            return
        self._step_tokens += sum(s.segment.end - s.segment.start for s in found if s.cached)
        self._blends.append(BlendPlan(plan, found, tuple(block_ids), plan.end - loaded))

    def step(self) -> StepPlan:
        """What the workers are to do before the forward that comes now."""
        plan = StepPlan(tuple(self._blends), tuple(self._saves))
        self._blends, self._saves, self._step_tokens = [], [], 0
        return plan

    def finished(self, request: Any) -> None:
        """A request has ended. What it missed is stored from now on."""
        self._found.pop(request.request_id, None)
        plan = self._plans.pop(request.request_id, None)
        if plan is None or not plan.save or self.store.read_only:
            return
        regime = self.rope.regime(len(plan.prompt.token_ids))
        found = find_sources(plan.prompt, self.store, self.spec, regime, "blend", False)
        missing = tuple(
            (s.segment.token_ids, s.segment.chunk_id) for s in found if s.status == "miss"
        )
        if missing:
            self._saves.append(SavePlan(plan.prompt.prefix_ids, missing))

    @property
    def has_work(self) -> bool:
        return bool(self._saves)

    def _read(self, request: Any) -> RequestPlan | None:
        ids = request.prompt_token_ids
        if not ids:
            return None
        given = dict((request.kv_transfer_params or {}).get(PARAMETER) or {})
        prompt: Prompt | None
        if "segments" in given:
            prompt = from_segments(ids, given["segments"])
        elif self.separator:
            prompt = from_separators(ids, self.separator)
        else:
            return None
        if prompt is None or not any(s.kind == "chunk" for s in prompt.segments):
            return None
        options = options_of(given, self.settings.blend)
        if options.mode == "full":
            return None
        return RequestPlan(
            request_id=request.request_id,
            prompt=prompt,
            options=options,
            save=bool(given.get("save", self.settings.save)),
            trace=given.get("trace", self.settings.trace),
            question_tokens=given.get("question_tokens"),
        )

    def _salt(self, plan: RequestPlan) -> str:
        """What the KV of a blended prompt depends on beside its token ids up to the last chunk."""
        o = plan.options
        said = repr(
            (
                *(o.mode, o.policy, o.ratios, o.threshold, o.check_layers, o.indices, o.seed),
                *(o.transfers, o.strict_context, [s.end for s in plan.prompt.segments[:-1]]),
                *(plan.prompt.segments[-1].token_ids, plan.question_tokens),
            )
        )
        return "cacheblend-" + hashlib.sha256(said.encode()).hexdigest()[:32]
