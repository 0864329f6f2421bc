"""A conversation over the store: what is opened once, and one turn after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cache_store.catalog import ChunkInfo
from cache_store.errors import NotFoundError
from cache_store.store import ChunkStore
from cbcli.calibrated import Calibrated, PromptTokens, without_auto
from cbcli.changes import ChangeWatch
from cbcli.chooser import Chooser
from cbcli.citations import Citations
from cbcli.output import Output
from cbcli.present import remember
from cbcli.session import (
    blend_options,
    load_engine,
    open_blueprint,
    open_existing_store,
    sampling_options,
    say_notes,
    warn_of_faults,
)
from cbcli.settings import Origin, Settings, read_value
from cbcli.usable import require_usable

if TYPE_CHECKING:
    from engine.api import Engine
    from engine.blueprint import Blueprint
    from engine.conversation import Conversation, Turn, TurnResult
    from engine.observer import Observer
    from engine.prompt import Prompt
    from engine.results import AskResult


@dataclass(frozen=True)
class Spoken:
    """An answered turn. chunks: those of the prompt, by their numbers; notes: what the user should
    be told; cited: None where that wasn't asked for."""

    question: str
    done: TurnResult
    chunks: dict[int, ChunkInfo]
    notes: tuple[str, ...]
    cited: Citations | None

    @property
    def result(self) -> AskResult:
        return self.done.result

    def to_json(self) -> dict[str, Any]:
        """What `ask --json` prints, and the turn."""
        record = {
            **self.result.to_json(),
            "turn": self.done.turn,
            "question": self.question,
            "kept_tokens": self.done.kept_tokens,
            "new_tokens": self.done.new_tokens,
        }
        return record | (self.cited.to_json() if self.cited is not None else {})


class Talk:
    """Turns over one store with one model; a context manager. `settings` may be changed between
    them, by `change`, but for what is opened. names: chunks to talk about, in place of those that
    each question retrieves."""

    def __init__(
        self, settings: Settings, out: Output, *, names: Sequence[str] = (), compare: bool = False
    ) -> None:
        self.settings, self.out = settings, out
        self.last: Spoken | None = None
        self._names, self._compare = list(names), compare
        self._stack = ExitStack()
        self._infos: dict[tuple[int, ...], ChunkInfo] = {}
        self._checked = False  # whether the store is of use to the model

    def open(self) -> None:
        """Opens store and model. Raises what is wrong with them."""
        from engine.api import Engine
        from engine.conversation import Conversation

        began = time.perf_counter()
        self.store: ChunkStore = self._stack.enter_context(open_existing_store(self.settings))
        warn_of_faults(self.store, self.out)
        self._chooser, self._changes = Chooser(self.store), ChangeWatch(self.store)
        if self._names:
            self._chooser.named(self._names)
        self.blueprint: Blueprint = open_blueprint(self.settings, self.out)
        remember(self.settings, self.blueprint)
        self._calibrated = Calibrated.open(self.blueprint, self.out, self.store)
        loaded = load_engine(self.settings, self.blueprint, self.store, out=self.out)
        self._stack.enter_context(loaded)
        assert isinstance(loaded, Engine)
        self.engine: Engine = loaded
        self.conversation: Conversation = Conversation(loaded, cite=self.settings.cite)
        self._opened_s = time.perf_counter() - began

    def begin_anew(self, turns: Sequence[Turn] = (), chunks: Sequence[ChunkInfo] = ()) -> None:
        """Another conversation, which goes on from `turns` with their chunks."""
        from engine.conversation import Conversation

        self.conversation = Conversation(self.engine, cite=self.settings.cite)
        self.conversation.resume(turns)
        self._infos = {self._ids(chunk): chunk for chunk in chunks}
        self.last = None

    def change(self, name: str, value: str) -> None:
        """Another value for a setting, from the next turn on. Raises UsageError."""
        origin = Origin("flag", f"/{name}")
        read: Any = read_value(name, value, origin, Path())
        origins = {**self.settings.origins, name: origin}
        wanted = replace(self.settings, **{name: read}, origins=origins)
        if name == "ratio":  # in place of what else said how much to recompute
            wanted = replace(wanted, threshold=None, target_kl=None)
        blend_options(without_auto(wanted)).check_model(self.blueprint.config.layers)
        self.settings = wanted
        self.conversation.cite = wanted.cite

    def turn(
        self,
        question: str,
        *,
        on_text: Callable[[str], None] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        observer: Observer | None = None,
    ) -> Spoken:
        """The answer to a question. Whatever is raised, the conversation is as it was before."""
        settings, began = self.settings, time.perf_counter()
        found, notes = self._choose(question)
        self._require_usable(found)
        chosen = time.perf_counter()
        sampling = sampling_options(settings)
        infos = {self._ids(chunk): chunk for chunk in found}
        planned = self.conversation.plan(
            question, [self.engine.chunk(c.text, c.source or None) for c in found], sampling
        )
        self._infos |= infos  # whatever comes after the answer, its chunks are known
        blend = blend_options(self._calibrated.settle(settings, _tokens(planned.prompt)))
        blend.check_model(self.blueprint.config.layers)
        laid_out = time.perf_counter()
        done = self.conversation.answer(
            planned,
            interrupted,
            blend=blend,
            sampling=sampling,
            compare=self._compare,
            save=settings.save,
            on_text=on_text,
            trace="full" if settings.trace_level == "full" else "basic",
            trace_layers=settings.trace_layers,
            observer=observer,
        )
        self._calibrated.saw(settings, done.result)
        notes += [*done.result.notes, *self._changes.lines(found)]
        self.last = self._spoken(question, self._timed(done, began, chosen, laid_out), notes)
        say_notes(self.store, self.out)
        return self.last

    def chunk_of(self, token_ids: tuple[int, ...]) -> ChunkInfo:
        """A chunk of the conversation."""
        return self._infos[token_ids]

    def _choose(self, question: str) -> tuple[list[ChunkInfo], list[str]]:
        """Chunks for a question, and what is to be said of them. In a conversation there may be
        none: then it goes on with those it has."""
        try:
            return self._chooser.choose(self.settings, question, self._names), []
        except NotFoundError as error:
            if not self.conversation.turns:
                raise
            return [], [f"{error.message}: answered from the conversation so far"]

    def _require_usable(self, chunks: Sequence[ChunkInfo]) -> None:
        if not self._checked:
            require_usable(self.out, self.store, self.blueprint, self.settings, chunks)
            self._checked = True

    def _timed(self, done: TurnResult, began: float, chosen: float, laid_out: float) -> TurnResult:
        timing, opened_s = done.result.timing, self._opened_s
        self._opened_s = 0.0  # counted with the first answer
        timing = replace(
            timing,
            load_model_s=max(opened_s, timing.load_model_s),
            retrieve_s=chosen - began,
            tokenize_s=laid_out - chosen,
            total_s=max(0.0, opened_s - timing.load_model_s) + timing.total_s + laid_out - began,
        )
        return replace(done, result=done.result.timed(timing))

    def _spoken(self, question: str, done: TurnResult, notes: Sequence[str]) -> Spoken:
        chunks = {c.number: self._infos[c.chunk.token_ids] for c in done.chunks}
        cited = None
        if self.settings.cite:
            given = [(c.number, chunks[c.number]) for c in done.numbered]
            cited = Citations.of(done.result.answer, given)
        return Spoken(question, done, chunks, tuple(notes), cited)

    def _ids(self, chunk: ChunkInfo) -> tuple[int, ...]:
        return tuple(self.engine.tokenizer.encode(chunk.text))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()


def _tokens(prompt: Prompt) -> PromptTokens:
    """What of it is there, is to be loaded, and is new."""
    new = (s for s in prompt.segments if s.kind == "chunk" and s.end > prompt.kept)
    cached = sum(s.end - s.start for s in new)
    prefix = 0 if prompt.kept else len(prompt.prefix_ids)
    return PromptTokens(len(prompt.token_ids), cached, prefix, prompt.kept)
