"""One prompt on its way through a vLLM in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.generate import Answer
from engine.options import BlendOptions, SamplingOptions
from engine.prompt import Prompt
from engine.vllm.naming import PARAMETER, listed

if TYPE_CHECKING:
    from engine.vllm.watching import Watched
    from engine.vllm.worker import BlendRun


@dataclass
class LocalRequest:
    """What is asked, and what has become of it so far.

    answer: takes the tokens and says where they end; None: all `sampling.max_tokens` are wanted,
    or up to one that ends an answer. began, ended: `time.perf_counter`; the blend: as the worker
    made it, None where there was none; failure: why there was none though there should have been.
    starts: when vLLM began each layer, where that is taken.
    """

    prompt: Prompt
    options: BlendOptions
    sampling: SamplingOptions
    watched: Watched
    answer: Answer | None = None
    end_ids: Sequence[int] = ()
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    blend: BlendRun | None = None
    failure: Exception | None = None
    done: bool = False
    starts: dict[int, float] = field(default_factory=dict)

    def layer_begins(self, layer: int) -> None:
        """vLLM comes to a layer of the prompt; of a prompt in pieces the last one counts."""
        if not self.tokens:
            self.starts[layer] = time.perf_counter()

    def take(self, tokens: Sequence[int], finished: bool) -> bool:
        """New output tokens; True where vLLM is to stop though it has not."""
        stop = False
        for token in tokens:
            self.tokens.append(token)
            stop = token in self.end_ids if self.answer is None else self.answer.push(token)
            if stop:
                break
        if stop or finished:
            self.done, self.ended = True, time.perf_counter()
        return stop and not finished


def parameters(prompt: Prompt, options: BlendOptions) -> dict[str, Any]:
    """What the connector is told: every segment, and every option; nothing is saved, for that is
    done after the answer. Empty for a prompt that is to be computed whole."""
    if options.mode == "full" or options.computes_all:
        return {}
    said: dict[str, Any] = {
        "segments": listed(prompt),
        "save": False,
        "mode": options.mode,
        "policy": options.policy,
        "check_layers": list(options.check_layers),
        "min_tokens": options.min_tokens if options.mode == "blend" else 0,
        "seed": options.seed,
        "strict_context": options.strict_context,
        "transfer": options.transfer,
    }
    if options.threshold is None:
        said["ratio"] = [str(ratio) for ratio in options.ratios]
    else:
        said["threshold"] = str(options.threshold)
    if options.indices is not None:
        said["indices"] = list(options.indices)
    return {PARAMETER: said}
