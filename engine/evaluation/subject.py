"""What is evaluated: an engine, as far as its answers are to be compared token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine.api import Engine
from engine.base import BaseEngine
from engine.compare import Agreement, Reference, agreement, reference
from engine.forward import forward
from engine.generate import generate
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import Prefilled, PrefillRun
from engine.prompt import Prompt


class Full(Protocol):
    """A full prefill and its greedy continuation, `tokens`, as the engine itself keeps it."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...


F = TypeVar("F", bound=Full)


@dataclass(frozen=True)
class Tried:
    """A prompt in one arm, against its full prefill; answer: greedy, None where none was wanted."""

    run: PrefillRun
    same: Agreement
    answer: str | None


@dataclass(frozen=True)
class Room:
    """tokens: of full prefill's answer that are compared; answer: most of an arm's own answer,
    None: it makes none."""

    tokens: int
    answer: int | None

    @property
    def most(self) -> int:
        """Tokens that come behind the prompt."""
        return max(self.tokens, self.answer or 0)


class Subject(Protocol, Generic[F]):
    """One engine. `over` is that engine, over a store that holds the prompt's chunks."""

    def full(self, prompt: Prompt, room: Room) -> F:
        """Its full prefill."""

    def compared(
        self, over: BaseEngine, prompt: Prompt, options: BlendOptions, full: F, room: Room
    ) -> Tried:
        """Another way to the same prompt's answer."""


class TorchSubject:
    """The engine that computes with torch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def full(self, prompt: Prompt, room: Room) -> Reference:
        model, ids = self.engine.model, prompt.token_ids
        capacity = min(len(ids) + room.most, model.config.context)
        return reference(model, ids, self.engine.end_ids, capacity, room.tokens)

    def compared(
        self, over: BaseEngine, prompt: Prompt, options: BlendOptions, full: Reference, room: Room
    ) -> Tried:
        assert isinstance(over, Engine)
        run = over.prefill(prompt, options, room=room.most)
        same = agreement(over.model, run.cache, run.tables, run.logits, full)
        answer = None if room.answer is None else self._answer(run, same, room.answer)
        return Tried(run, same, answer)

    def _answer(self, run: Prefilled, same: Agreement, most: int) -> str:
        """The greedy answer, from where the comparison has left it: the KV of all tokens known by
        then, but of the last, is there."""
        end_ids, stream, cache = self.engine.end_ids, self.engine.tokenizer.stream(), run.cache
        known = [token for token in same.greedy if token not in end_ids][:most]
        text = "".join([stream.push(token) for token in known])
        cache.length += len(same.greedy) - 1
        left = most - len(known)
        if same.greedy[-1] in end_ids or not left or cache.length == cache.capacity:
            return text + stream.finish()
        logits = forward(self.engine.model, cache, same.greedy[-1:], run.tables)
        options = SamplingOptions(max_tokens=left)
        return (
            text
            + generate(self.engine.model, cache, run.tables, logits, options, stream, end_ids).text
        )
