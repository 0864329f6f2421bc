"""What every engine is to those who ask it: a model, its prompt template, a store of chunk KV."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, Self

from cache_store.errors import CacheblendError, UsageError
from cache_store.keys import chunk_id
from engine.audit import Audit
from engine.blueprint import Blueprint
from engine.codec import Codec
from engine.model import Decoder
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.precompute import ChunkWriter
from engine.prefill import PrefillRun
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.results import AskResult, ModelInfo
from engine.sources import KVStore, Source
from engine.trace.record import Level


class AnswerUnderWay(Protocol):
    """An answer that is computed together with others."""

    @property
    def done(self) -> bool: ...

    def finish(self, began: float, *, save: bool) -> AskResult:
        """Its result, when it is done. began: `time.perf_counter` when work on it began; save: as
        in `BaseEngine.generate`."""


class BaseEngine(ABC):
    """A model on a device, its prompt template, and the store that holds chunk KV.

    Not thread-safe; one engine answers one prompt at a time. `model` is the decoder that chunks
    are computed with. A context manager, which gives back what the engine holds.
    """

    name: ClassVar[str]

    def __init__(self, model: Decoder, blueprint: Blueprint, store: KVStore | None) -> None:
        self.model, self.blueprint, self.store = model, blueprint, store
        self.tokenizer, self.template = blueprint.tokenizer, blueprint.template
        self.spec = blueprint.spec
        self.info = ModelInfo(
            blueprint.name,
            self.spec.model,
            blueprint.dtype,
            blueprint.kv_dtype,
            str(model.device),
        )
        self.codec = Codec.of(self.spec, model.dtype)
        self._writer: ChunkWriter | None = None

    @abstractmethod
    def over(self, store: KVStore | None) -> Self:
        """The same model over another store; as long as this one is open."""

    @abstractmethod
    def prefill(self, prompt: Prompt, options: BlendOptions, room: int = 0) -> PrefillRun:
        """Brings a prompt to its first output token; `room`: tokens the answer may take. Raises
        UsageError as `generate` does."""

    @abstractmethod
    def generate(
        self,
        prompt: Prompt,
        *,
        blend: BlendOptions | None = None,
        sampling: SamplingOptions | None = None,
        compare: bool = False,
        audit: Audit | None = None,
        save: bool = True,
        on_text: Callable[[str], None] | None = None,
        trace: Level | None = None,
        trace_layers: Sequence[int] | None = None,
        question: str | None = None,
        observer: Observer | None = None,
    ) -> AskResult:
        """Answers a prompt of segments.

        compare: also run a full prefill of the same ids. audit: do so after the answer where this
        prompt is due and stored KV was used for it, and log how far it was off. save: chunks that
        missed are computed again alone and stored, after the answer. on_text gets the answer piece
        by piece. trace: record the run; `full` also measures how far stored KV is from a full
        prefill's at `trace_layers` (None: a few spread over the model), after the answer; question:
        as the trace is to show it. observer: told how it goes on. Raises UsageError for a prompt
        longer than the model's context and for options the model cannot honour.
        """

    def begin(
        self, prompt: Prompt, blend: BlendOptions, sampling: SamplingOptions
    ) -> AnswerUnderWay:
        """Begins an answer that others are computed together with, by `go_on`. Raises as `generate`
        does, and UsageError where the engine answers one prompt at a time."""
        raise UsageError(f"engine {self.name} answers one prompt at a time")

    def go_on(self) -> None:
        """Goes on with all answers that were begun."""
        raise UsageError(f"engine {self.name} answers one prompt at a time")

    def close(self) -> None:  # noqa: B027
        """Gives back what the engine holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return self.model.config.eos_ids

    # Prompts

    def chunk(self, text: str, source: str | None = None) -> PromptChunk:
        """A chunk of text, encoded alone, under the id it has in every store."""
        return PromptChunk(tuple(self.tokenizer.encode(text)), chunk_id(text), source)

    def prompt(self, question: str, chunks: Sequence[PromptChunk]) -> Prompt:
        """Lays out prefix, chunks in the order given, and question. Raises UsageError."""
        if not question.strip():
            raise UsageError("the question is empty", "give a question")
        return lay_out(
            self.template.prefix, chunks, self.template.separator, self.template.suffix(question)
        )

    def ask(
        self,
        question: str,
        chunks: Sequence[PromptChunk],
        *,
        blend: BlendOptions | None = None,
        sampling: SamplingOptions | None = None,
        compare: bool = False,
        audit: Audit | None = None,
        save: bool = True,
        on_text: Callable[[str], None] | None = None,
        trace: Level | None = None,
        trace_layers: Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> AskResult:
        """Answers a question over chunks, in the order given. See `generate`."""
        began = time.perf_counter()
        prompt = self.prompt(question, chunks)
        tokenize_s = time.perf_counter() - began
        result = self.generate(
            prompt,
            blend=blend,
            sampling=sampling,
            compare=compare,
            audit=audit,
            save=save,
            on_text=on_text,
            trace=trace,
            trace_layers=trace_layers,
            question=question,
            observer=observer,
        )
        timing = replace(
            result.timing, tokenize_s=tokenize_s, total_s=result.timing.total_s + tokenize_s
        )
        return result.timed(timing)

    # Chunk KV

    def precompute(self, chunks: Iterable[PromptChunk]) -> int:
        """Computes and stores, behind this engine's context, what the store does not hold yet.

        Returns how many chunks were computed. Raises UsageError without a store, StoreFullError.
        """
        return self.writer().write_missing(chunks)

    def writer(
        self, context: Sequence[int] | None = None, prefix: Sequence[int] | None = None
    ) -> ChunkWriter:
        """Stores chunks behind `context`, and the KV of `prefix` (None: of the context).

        Without a context it is this engine's, with this engine's prefix.
        """
        if self.store is None:
            raise UsageError("this engine has no store", "give Engine.load a store")
        if context is None:
            context, prefix = self.blueprint.chunk_context, self.template.prefix
        wanted = tuple(context), tuple(context if prefix is None else prefix)
        if self._writer is None or (self._writer.context, self._writer.prefix) != wanted:
            self._writer = ChunkWriter(self.model, self.store, self.spec, *wanted)
        return self._writer

    def _save_missing(self, prompt: Prompt, found: Sequence[Source]) -> tuple[str, ...]:
        """Stores what missed, computed alone behind the prompt's own prefix, or the shorter context
        that this engine computes chunks behind."""
        if self.store is None or self.store.read_only:
            return ()
        missing = [s.segment for s in found if s.status == "miss"]
        prefix, kind = prompt.prefix_ids, self.blueprint.context
        context = prefix if kind == "prefix" else self.template.context(kind)
        try:
            self.writer(context, prefix).write_missing(missing, saved=True)
        except CacheblendError as error:  # the answer is there; it must not be lost for this
            return (f"not every new chunk was stored: {error.message}",)
        return ()
