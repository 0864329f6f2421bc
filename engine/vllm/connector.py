"""The KV connector that vLLM loads: `kv_connector="CacheBlendConnector"`."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.version import __version__ as VLLM_VERSION

from engine.audit import Audit, AuditLog
from engine.model import DTYPES
from engine.ranks import ALONE, Ranks
from engine.results import ModelInfo
from engine.rope import Rope
from engine.sources import KVStore
from engine.vllm.auditing import Auditor
from engine.vllm.audits import AuditQueue
from engine.vllm.checks import as_computed, check_config, check_layers, said
from engine.vllm.decoder import VllmDecoder
from engine.vllm.messages import ResultMetadata, StepMetadata, WorkerState
from engine.vllm.metrics import Tally
from engine.vllm.names import WORKER
from engine.vllm.plan import StepPlan
from engine.vllm.prometheus import BlendPromMetrics, BlendStats
from engine.vllm.ranks import GroupRanks
from engine.vllm.scheduler import BlendScheduler
from engine.vllm.selftest import Prefiller, self_test
from engine.vllm.separators import Separator
from engine.vllm.settings import ConnectorSettings, open_blueprint, open_store
from engine.vllm.steps import StepResult, StepRunner
from engine.vllm.stored import StoredChunks
from engine.vllm.tails import TailedKV
from engine.vllm.tracing import TraceWriter
from engine.vllm.worker import BlendWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.cacheblend")


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
        blueprint = open_blueprint(
            self.settings, model.model, names[model.dtype], revision=model.revision
        )
        self.blueprint = as_computed(blueprint, model)
        self.store = open_store(self.settings)
        if role == KVConnectorRole.SCHEDULER:
            for fault in self.store.faults:
                logger.warning("cacheblend: %s: %s", fault.message, self.store.without(fault))
        self.block_size = vllm_config.cache_config.block_size
        self.off: str | None = None
        self.worker: BlendWorker | None = None
        self.scheduler: BlendScheduler | None = None
        self.traces: TraceWriter | None = None
        self.steps = StepRunner(None, self.block_size, logger.warning)
        self._done = StepResult()
        self._tally = Tally()  # of the scheduler's side
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = self._schedules(vllm_config)

    def use(self, store: KVStore, loader: str) -> None:
        """Blends from another store from now on, which the caller closes, and loads as `loader`
        does; in its own process."""
        if self.scheduler is not None:
            self.scheduler.use(store, loader)
        if isinstance(self.steps.worker, BlendWorker):
            self.steps.worker.store = store

    # The workers' side.

    def attach(self, model: torch.nn.Module, attention: dict[str, Any]) -> None:
        """vLLM's loaded model and its attention layers, whose KV cache is there."""
        with said():
            check_layers(attention, self.blueprint.config.layers)
        embed = next(model.parameters())
        config, group = self.blueprint.config, get_tp_group()
        ranks: Ranks = ALONE
        if group.world_size > 1:
            ranks = GroupRanks(group.device_group, group.cpu_group, config.kv_heads)
        rows = self._vllm_config.scheduler_config.max_num_batched_tokens
        dtype = DTYPES[self.blueprint.dtype]
        decoder = VllmDecoder(config, model, embed.device, dtype, ranks, rows)
        paged = TailedKV(attention, self.block_size, embed.device)
        self.worker = BlendWorker(decoder, self.store, self.blueprint.spec, paged)
        self.steps.worker, self.steps.tails = self.worker, paged
        if ranks.leads:
            about = decoder, self.blueprint, lambda: self.store, self.settings, logger.warning
            self.traces = TraceWriter(*about, whole=group.world_size == 1)
            self.steps.listeners.append(self.traces)
        else:
            self.steps.warn = logger.debug  # all ranks meet the same, and the first says it
        audit = self._audit()
        if audit is not None:
            blueprint = self.blueprint
            types = blueprint.dtype, blueprint.kv_dtype, str(embed.device)
            info = ModelInfo(blueprint.name, blueprint.spec.model, *types)
            self.steps.auditor = Auditor(self.worker, info, audit)

    def try_out(self, vllm: Prefiller) -> None:
        """The self-test, once vLLM is warm; switches blending off where it fails."""
        if self.worker is None or not self.settings.self_test:
            return
        verdict = self_test(self.worker, vllm)
        self.off = verdict.off
        logger.info("cacheblend: self-test: %s", verdict)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._done = self.steps.blend(self._plan)

    def wait_for_save(self) -> None:
        self.steps.save(self._plan)
        self.steps.audit(self._plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._done.failed_blocks)

    def build_connector_worker_meta(self) -> ResultMetadata | None:
        done, self._done = self._done, StepResult()
        off = self.steps.off
        return ResultMetadata(done.summaries, off) if done.summaries or off else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def get_handshake_metadata(self) -> WorkerState | None:
        missing = None if self.steps.worker else f"vLLM's worker_cls is not {WORKER}"
        return WorkerState(self.off or self.steps.off or missing)

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        for state in metadata.values():
            self.off = self.off or state.off
        if self.off is not None:
            logger.warning("cacheblend: off: %s; prompts are computed as without it", self.off)

    def on_new_request(self, request: Request) -> None:
        if self.scheduler is None:
            return
        if self.off is not None:
            self._tally.request("off")
            return
        refused = self.scheduler.refused
        if self.scheduler.arrived(request) is None:
            self._tally.request("plain" if self.scheduler.refused == refused else "refused")
        self._say()

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
        if self.scheduler is None:
            return StepMetadata(StepPlan())
        plan = self.scheduler.step(busy=scheduler_output.total_num_scheduled_tokens > 0)
        self._say()
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        result = connector_output.kv_connector_worker_meta
        if self.scheduler is not None and isinstance(result, ResultMetadata):
            self.off = self.off or result.off  # the worker has said so
            self.scheduler.results(result.summaries)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None if self.scheduler is None else self.scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_work

    # What both sides count.

    def get_kv_connector_stats(self) -> BlendStats | None:
        if self.scheduler is not None:
            for summary in self.scheduler.take_summaries():
                self._tally.summary(summary)
            return BlendStats.taken(self._tally)
        if get_tensor_model_parallel_rank():  # all ranks do the same, which counts once
            return None
        return BlendStats.taken(self.steps.tally)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **named: Any) -> BlendPromMetrics:
        return BlendPromMetrics(*args, **named)

    def shutdown(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        if self.traces is not None:
            self.traces.close()
        self.store.close()

    @property
    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan

    def _schedules(self, vllm_config: VllmConfig) -> BlendScheduler:
        if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                'cacheblend: with kv_load_failure_policy "fail" a request fails where its stored '
                'KV can\'t be used: set it to "recompute"'
            )
        settings, blueprint = self.settings, self.blueprint
        separator = None
        if settings.separator is not None:
            separator = Separator(blueprint.tokenizer, settings.separator)
            if not separator.ids:
                logger.warning(
                    "cacheblend: the model's tokenizer can't spell the separator %r: only requests "
                    "that list their chunks are blended",
                    settings.separator,
                )
        idles = envs.VLLM_ENABLE_V1_MULTIPROCESSING or _in_core_process()
        return BlendScheduler(
            settings,
            self.store,
            blueprint.spec,
            Rope(blueprint.config, torch.device("cpu")),
            separator,
            stored=StoredChunks(self.store, blueprint),
            context=None if blueprint.context == "prefix" else blueprint.chunk_context,
            audits=AuditQueue(self._audit(), idles=idles),
            idles=idles,
        )

    def _audit(self) -> Audit | None:
        every = self.settings.audit
        log, task = AuditLog(self.store.journal), self.settings.task
        return Audit(log, every, task=task) if every else None

    def _say(self) -> None:
        if self.scheduler is not None and self.scheduler.warnings:
            for line in self.scheduler.warnings:
                logger.warning("cacheblend: %s", line)
            self.scheduler.warnings.clear()


def _in_core_process() -> bool:
    """Whether the engine core runs alone in this process, in a loop of its own."""
    return multiprocessing.current_process().name.startswith("EngineCore")
