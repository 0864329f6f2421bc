"""What vLLM is told that our parts are called."""

from collections.abc import Mapping
from typing import Any

WORKER = "engine.vllm.host.CacheBlendWorker"
CONNECTOR = "CacheBlendConnector"
CONNECTOR_MODULE = "engine.vllm.connector"


def transfer_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`; extra: the connector's own settings."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }
