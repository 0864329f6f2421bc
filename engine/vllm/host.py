"""The worker class that hands vLLM's model to the connector; `worker_cls` in vLLM's settings."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from engine.vllm.connector import CacheBlendConnector

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class CacheBlendWorker(PlatformWorker):
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if isinstance(connector, CacheBlendConnector):
            context = self.vllm_config.compilation_config.static_forward_context
            layers = {n: layer for n, layer in context.items() if isinstance(layer, Attention)}
            connector.attach(self.model_runner.get_model(), layers)
