"""Models, prompts, blending and generation; `Engine` is the Python API."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api import Engine
    from engine.conversation import Conversation
    from engine.options import BlendOptions, SamplingOptions
    from engine.prompt import Prompt, PromptChunk
    from engine.results import AskResult

_HOMES = {
    "Engine": "engine.api",
    "Conversation": "engine.conversation",
    "BlendOptions": "engine.options",
    "SamplingOptions": "engine.options",
    "Prompt": "engine.prompt",
    "PromptChunk": "engine.prompt",
    "AskResult": "engine.results",
}
__all__ = [
    "AskResult",
    "BlendOptions",
    "Conversation",
    "Engine",
    "Prompt",
    "PromptChunk",
    "SamplingOptions",
]


def __getattr__(name: str) -> Any:
    """Imported on first use: `import engine.something_light` must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
