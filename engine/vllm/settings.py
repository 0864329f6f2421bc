"""What a connector is told when vLLM starts: vLLM's `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache_store.errors import UsageError
from engine.context import ContextKind, context_kind
from engine.options import BlendOptions
from engine.trace.record import Level

SEPARATOR = " # # "


@dataclass(frozen=True)
class ConnectorSettings:
    """store: the folder of the store. model: the folder of the model, as the store knows it; None:
    vLLM's own. blend: how a request is blended that doesn't say. separator: text that stands
    between a prompt's chunks, and between its last chunk and the question; None: requests name
    their chunks otherwise. step_tokens: so many tokens of chunks are blended before one forward of
    the engine, at least one request's. kv_dtype, context: see `Blueprint.open`. self_test: whether
    blending is compared with vLLM's own prefill at start. any_version: whether versions of vLLM are
    tried that this isn't tested with.
    """

    store: Path
    model: Path | None = None
    name: str | None = None
    blend: BlendOptions = field(default_factory=BlendOptions)
    separator: str | None = SEPARATOR
    context: ContextKind = "prefix"
    kv_dtype: str = "auto"
    save: bool = True
    trace: Level | None = None
    step_tokens: int = 16_384
    self_test: bool = True
    any_version: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ConnectorSettings":
        """From vLLM's extra configuration. Raises UsageError."""
        values = dict(given)
        store = values.pop("store", None)
        if not store:
            raise UsageError(
                "the connector is not told which store to use",
                'give "store": PATH in kv_connector_extra_config',
            )
        blend = {
            name: values.pop(name)
            for name in (
                *("mode", "policy", "ratio", "threshold", "check_layers", "min_tokens"),
                *("strict_context", "loader", "seed", "transfer"),
            )
            if name in values
        }
        known = {"model", "name", "separator", "context", "kv_dtype", "save", "trace"}
        known |= {"step_tokens", "self_test", "any_version"}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"kv_connector_extra_config: {unknown[0]!r} is unknown")
        if "context" in values:
            values["context"] = context_kind(values["context"])
        if values.get("model"):
            values["model"] = Path(values["model"])
        return cls(store=Path(store), blend=BlendOptions.of(**blend), **values)
