"""vLLM as what is evaluated."""

from __future__ import annotations

from engine.base import BaseEngine
from engine.evaluation.subject import Room, Tried
from engine.options import BlendOptions, SamplingOptions
from engine.prompt import Prompt
from engine.vllm.local import Reference, VllmEngine


class VllmSubject:
    """Every comparison is a request of its own; see `VllmEngine.along`."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def full(self, prompt: Prompt, room: Room) -> Reference:
        return self.engine.reference(prompt, room.tokens)

    def compared(
        self, over: BaseEngine, prompt: Prompt, options: BlendOptions, full: Reference, room: Room
    ) -> Tried:
        assert isinstance(over, VllmEngine)
        run, same = over.along(prompt, options, full)
        answer = None
        if room.answer is not None:
            answer = over.answer_alone(
                prompt, options, SamplingOptions(max_tokens=room.answer)
            ).text
        return Tried(run, same, answer)
