"""What a running server has at hand, and what it tells of itself."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING, Any

from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from engine.vllm.naming import RequestReader
from engine.vllm.prompts import PromptBuilder
from engine.vllm.server import Ready
from engine.vllm.server_requests import RequestLayout
from engine.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from engine.vllm.server import ServerPlan


class ServerState:
    """engine: vLLM's client of its engine; args: its server's own settings."""

    def __init__(self, plan: ServerPlan, engine: Any, args: Any, vllm: str) -> None:
        self._plan, self._engine, self._args, self._vllm = plan, engine, args, vllm
        self._why_off: list[str | None] | None = None  # of each worker; settled when they start
        self._settings = ConnectorSettings.of(plan.connector)
        self._store = ChunkStore.open(self._settings.store, read_only=True, on_damage="go_on")

    @cached_property
    def layout(self) -> RequestLayout:
        plan, settings = self._plan, self._settings
        builder = PromptBuilder(
            plan.blueprint,
            self._store,
            separator=plan.separator,
            template_date=plan.template_date,
        )
        reader = RequestReader(settings, plan.blueprint.config.layers)
        longest = int(self._engine.model_config.max_model_len)
        return RequestLayout(builder, reader, settings.separator, longest)

    async def ready(self) -> Ready:
        names = self._args.served_model_name or [self._plan.blueprint.name]
        name = names if isinstance(names, str) else names[0]
        return Ready(self._args.host, self._args.port, name, self._vllm, await self._off())

    async def described(self) -> dict[str, Any]:
        """The answer of /v1/cacheblend: versions, whether prompts are blended, how, and the
        store."""
        off, blend = await self._off(), self._settings.blend
        try:
            store: dict[str, Any] = asdict(await asyncio.to_thread(self._store.stats))
        except CacheblendError as error:
            store = {"path": str(self._settings.store), "error": error.message}
        blueprint = self._plan.blueprint
        return {
            "cacheblend": metadata.version("cacheblend"),
            "vllm": self._vllm,
            "blending": {"on": off is None, "why": off},
            "model": {
                "name": blueprint.name,
                "fingerprint": blueprint.spec.model,
                "dtype": blueprint.dtype,
                "kv_dtype": blueprint.kv_dtype,
            },
            "settings": {
                "mode": blend.mode,
                "policy": blend.policy,
                "ratios": [float(ratio) for ratio in blend.ratios],
                "threshold": None if blend.threshold is None else float(blend.threshold),
                "min_tokens": blend.min_tokens,
                "separator": self._settings.separator,
                "context": self._settings.context,
                "save": self._settings.save,
                "audit": self._settings.audit,
            },
            "store": store,
        }

    async def _off(self) -> str | None:
        """Why the workers don't blend, None where all do."""
        if self._why_off is None:  # it waits for the engine's step, and the engine for it
            self._why_off = await self._engine.collective_rpc("why_blending_is_off")
        return next((str(why) for why in self._why_off if why is not None), None)
