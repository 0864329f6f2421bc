"""The worker class that hands vLLM's model to the connector; `worker_cls` in vLLM's settings."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.version import __version__ as VLLM_VERSION

from engine.vllm.checks import check_config, said
from engine.vllm.connector import CacheBlendConnector
from engine.vllm.runner import WorkerPrefiller

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class CacheBlendWorker(PlatformWorker):
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector(CacheBlendConnector.__name__):
            with said():  # while there is no weight to wait for
                check_config(vllm_config, VLLM_VERSION)
        super().__init__(vllm_config, *args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, CacheBlendConnector):
            context = self.vllm_config.compilation_config.static_forward_context
            layers = {n: layer for n, layer in context.items() if isinstance(layer, Attention)}
            connector.attach(self.model_runner.get_model(), layers)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, CacheBlendConnector) and connector.worker is not None:
            connector.try_out(WorkerPrefiller(self, connector.worker.paged))
        return times

    def why_blending_is_off(self) -> str | None:
        """None where it is on. For the server's process, which asks all workers."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, CacheBlendConnector):
            return "vLLM runs without the connector"
        state = connector.get_handshake_metadata()
        return None if state is None else state.off
