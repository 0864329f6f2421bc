"""The KV connector that vLLM loads: `kv_connector="CacheBlendConnector"`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.model import DTYPES
from engine.rope import Rope
from engine.vllm.checks import WORKER, check_config, check_layers, said
from engine.vllm.decoder import VllmDecoder
from engine.vllm.paged import PagedKV
from engine.vllm.plan import StepPlan
from engine.vllm.scheduler import BlendScheduler
from engine.vllm.settings import ConnectorSettings
from engine.vllm.worker import BlendWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.cacheblend")


@dataclass
class StepMetadata(KVConnectorMetadata):
    plan: StepPlan


@dataclass
class WorkerState(KVConnectorHandshakeMetadata):
    """off: why a worker can't blend, None if it can."""

    off: str | None


class CacheBlendConnector(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        with said():
            check_config(vllm_config, VLLM_VERSION, kv_cache_config)
        self.settings = ConnectorSettings.of(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        model = vllm_config.model_config
        names = {dtype: name for name, dtype in DTYPES.items()}
        self.blueprint = Blueprint.open(
            self.settings.model or model.model,
            name=self.settings.name,
            device="cpu",
            dtype=names[model.dtype],
            kv_dtype=self.settings.kv_dtype,
            context=self.settings.context,
        )
        self.store = ChunkStore.open(self.settings.store, on_damage="go_on")
        self.block_size = vllm_config.cache_config.block_size
        self.off: str | None = None
        self.worker: BlendWorker | None = None
        self.scheduler: BlendScheduler | None = None
        self._failed: set[int] = set()
        self.runs: list[Any] = []
        if role == KVConnectorRole.SCHEDULER:
            separator = self.settings.separator
            ids = self.blueprint.tokenizer.encode(separator) if separator else ()
            rope = Rope(self.blueprint.config, torch.device("cpu"))
            self.scheduler = BlendScheduler(
                self.settings, self.store, self.blueprint.spec, rope, tuple(ids)
            )

    # The workers' side.

    def attach(self, model: torch.nn.Module, attention: dict[str, Any]) -> None:
        """vLLM's loaded model and its attention layers, whose KV cache is there."""
        with said():
            check_layers(attention, self.blueprint.config.layers)
        embed = next(model.parameters())
        decoder = VllmDecoder(
            self.blueprint.config, model, embed.device, DTYPES[self.blueprint.dtype]
        )
        paged = PagedKV(attention, self.block_size, embed.device)
        self.worker = BlendWorker(decoder, self.store, self.blueprint.spec, paged)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        if self.worker is None:
            return
        for plan in metadata.plan.blends:
            try:
                self.runs.append(self.worker.blend(plan))
            except Exception:
                logger.exception("request %s could not be blended", plan.request.request_id)
                first = plan.held // self.block_size
                self._failed.update(plan.block_ids[first:])
        for save in metadata.plan.saves:
            self.worker.save(save)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_handshake_metadata(self) -> WorkerState | None:
        missing = None if self.worker else f"vLLM's worker_cls is not {WORKER}"
        return WorkerState(self.off or missing)

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        for state in metadata.values():
            self.off = self.off or state.off
        if self.off is not None:
            logger.warning("cacheblend: off: %s; prompts are computed as without it", self.off)

    def on_new_request(self, request: Request) -> None:
        if self.scheduler is not None and self.off is None:
            self.scheduler.arrived(request)
            self._say(self.scheduler)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler is None or self.off is not None:
            return 0, False
        return self.scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler is not None:
            self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = StepPlan() if self.scheduler is None else self.scheduler.step()
        return StepMetadata(plan)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler is not None:
            self.scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_work

    def shutdown(self) -> None:
        self.store.close()

    def _say(self, scheduler: BlendScheduler) -> None:
        warnings: Iterable[str] = scheduler.warnings
        for line in warnings:
            logger.warning("%s", line)
        scheduler.warnings.clear()
