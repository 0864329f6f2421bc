"""Which requests are blended, and which are vLLM's."""

from collections.abc import Sequence
from typing import Any

from engine.sources import Source
from engine.vllm.plan import RequestPlan


def other_kind(request: Any) -> str | None:
    """What makes a request of vLLM's one that is none of ours, None where it is text and nothing
    else."""
    kinds = {
        "prompt_embeds": "its prompt is given as embeddings",
        "prompt_is_token_ids": "its prompt is given as embeddings",
        "mm_features": "its prompt is multimodal",
        "lora_request": "it uses a LoRA adapter",
        "pooling_params": "it asks for pooling",
        "resumable": "its input is streamed",
    }
    for name, why in kinds.items():
        value = getattr(request, name, None)
        if value is not None and value is not False and value != []:
            return why
    return None


def left_to_vllm(request: Any, plan: RequestPlan) -> str | None:
    """Why vLLM computes a request altogether, None where it may be blended."""
    if plan.options.computes_all:
        return "all of it is to be computed"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it asks for what only computing gives, as log-probabilities of the prompt"
    return None


def not_worth_it(plan: RequestPlan, sources: Sequence[Source], step_tokens: int) -> str | None:
    """Why a request is not to be blended with what was found, None where it is. step_tokens: the
    most missed tokens that are computed at one go."""
    options = plan.options
    cached = _tokens(sources, cached=True)
    if not cached:
        return "nothing of it is stored"
    if options.mode == "blend" and cached < options.min_tokens:
        return f"{cached} cached tokens; blending begins at {options.min_tokens}"
    missing = _tokens(sources, cached=False)
    if missing > step_tokens:
        return f"{missing} tokens of missed chunks are more than one step computes ({step_tokens})"
    if options.indices is not None:
        places = {p for s in sources if s.cached for p in range(s.segment.start, s.segment.end)}
        if outside := sorted(set(options.indices) - places):
            return f"position {outside[0]} is not a cached token of this prompt"
    return None


def _tokens(sources: Sequence[Source], *, cached: bool) -> int:
    """Of chunks whose KV is stored, or is not."""
    chunks = (s for s in sources if s.segment.kind == "chunk" and s.cached == cached)
    return sum(s.segment.end - s.segment.start for s in chunks)
