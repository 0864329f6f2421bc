"""The worker class that hands vLLM's model to the connector; `worker_cls` in vLLM's settings."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.version import __version__ as VLLM_VERSION

from engine.loaders.pipelined import PipelinedLoader
from engine.vllm.checks import check_config, said
from engine.vllm.connector import CacheBlendConnector
from engine.vllm.reserve import computed_bytes, left_for_blocks, staged_bytes
from engine.vllm.runner import WorkerPrefiller

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger("vllm.cacheblend")


class CacheBlendWorker(PlatformWorker):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector(CacheBlendConnector.__name__):
            with said():  # while there is no weight to wait for
                check_config(vllm_config, VLLM_VERSION)
        super().__init__(vllm_config, *args, **kwargs)

    def determine_available_memory(self) -> int:
        """Less what a blend stages on an accelerator, unless the user has set the size."""
        available: int = super().determine_available_memory()
        transfer = self.vllm_config.kv_transfer_config
        if (
            current_platform.is_cpu()
            or self.cache_config.kv_cache_memory_bytes
            or transfer is None
            or not transfer.has_connector(CacheBlendConnector.__name__)
        ):
            return available
        model, ranks = self.model_config, self.parallel_config
        staged = staged_bytes(
            model.max_model_len,
            model.get_num_layers(ranks),
            model.get_num_kv_heads(ranks),
            model.get_head_size(),
            model.dtype.itemsize,
            PipelinedLoader.space,
        )
        staged += computed_bytes(
            model.max_model_len,
            model.get_hidden_size(),
            model.get_num_attention_heads(ranks),
            model.get_num_kv_heads(ranks),
            model.get_head_size(),
            model.dtype.itemsize,
        )
        left, kept = left_for_blocks(available, staged)
        logger.info(
            "cacheblend: %.2f GB are kept for blending one prompt; %.2f for one of %d tokens",
            *(kept / 1e9, staged / 1e9, model.max_model_len),
        )
        return left

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        connector = _connector()
        if connector is not None:
            context = self.vllm_config.compilation_config.static_forward_context
            layers = {n: layer for n, layer in context.items() if isinstance(layer, Attention)}
            connector.attach(self.model_runner.get_model(), layers)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        connector = _connector()
        if connector is not None and connector.worker is not None:
            connector.try_out(WorkerPrefiller(self, connector.worker.paged))
        return times

    # Stored KV is of the weights that were loaded at start, by their name and hash.

    def sleep(self, level: int = 1) -> None:
        connector = _connector()
        if connector is not None:
            connector.steps.asleep = True
            if level > 1:  # which drops the weights
                connector.steps.weights_changed()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        connector = _connector()
        if connector is not None and (tags is None or "kv_cache" in tags):
            connector.steps.asleep = False

    def reload_weights(self, *args: Any, **named: Any) -> None:
        _weights_change()
        super().reload_weights(*args, **named)

    def start_weight_update(self, *args: Any, **named: Any) -> None:
        _weights_change()
        super().start_weight_update(*args, **named)

    def update_weights(self, *args: Any, **named: Any) -> None:
        _weights_change()
        super().update_weights(*args, **named)

    def why_blending_is_off(self) -> str | None:
        """None where it is on. For the server's process, which asks all workers."""
        connector = _connector()
        if connector is None:
            return "vLLM runs without the connector"
        state = connector.get_handshake_metadata()
        return None if state is None else state.off


def _connector() -> CacheBlendConnector | None:
    """This worker's."""
    found = get_kv_transfer_group() if has_kv_transfer_group() else None
    return found if isinstance(found, CacheBlendConnector) else None


def _weights_change() -> None:
    connector = _connector()
    if connector is not None:
        connector.steps.weights_changed()
