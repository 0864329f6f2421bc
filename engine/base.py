"""What every engine is to those who ask it: a model, its prompt template, a store of chunk KV."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, Self, Unpack

from cache_store.errors import CacheblendError, UsageError
from cache_store.keys import chunk_id
from engine.answered import Beside, Done, answered
from engine.asked import Asked, AskWishes, Wishes
from engine.blueprint import Blueprint
from engine.codec import Codec
from engine.compare import Agreement
from engine.lookups import account
from engine.lookups import notes as miss_notes
from engine.model import Decoder
from engine.options import BlendOptions, SamplingOptions
from engine.precompute import ChunkWriter
from engine.prefill import PrefillRun
from engine.prompt import Prompt, PromptChunk
from engine.results import AskResult, Audited, ModelInfo
from engine.sources import KVStore, Source
from engine.trace.record import Trace
from engine.trace.recorder import Recorder


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
        self._load_s = 0.0

    @abstractmethod
    def over(self, store: KVStore | None) -> Self:
        """The same model over another store; as long as this one is open."""

    @abstractmethod
    def prefill(self, prompt: Prompt, options: BlendOptions, room: int = 0) -> PrefillRun:
        """Brings a prompt to its first output token; `room`: tokens the answer may take. Raises
        UsageError as `generate` does."""

    def generate(self, prompt: Prompt, **wishes: Unpack[Wishes]) -> AskResult:
        """Answers a prompt of segments, as far as `engine.asked.Wishes` says.

        Raises UsageError for a prompt longer than the model's context and for options the model
        cannot honour.
        """
        return self._generate(prompt, Asked.of(wishes))

    @abstractmethod
    def _generate(self, prompt: Prompt, asked: Asked) -> AskResult:
        """See `generate`."""

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

    def prompt(self, question: str, chunks: Sequence[PromptChunk], *, cite: bool = False) -> Prompt:
        """Lays out prefix, chunks in the order given, and question. cite: chunks are numbered from
        1, and their numbers asked for. Raises UsageError."""
        if not question.strip():
            raise UsageError("the question is empty", "give a question")
        return self.template.lay_out(chunks, question, cite=cite)

    def ask(
        self,
        question: str,
        chunks: Sequence[PromptChunk],
        *,
        cite: bool = False,
        **wishes: Unpack[AskWishes],
    ) -> AskResult:
        """Answers a question over chunks, in the order given. See `prompt` and `generate`."""
        began = time.perf_counter()
        prompt = self.prompt(question, chunks, cite=cite)
        tokenize_s = time.perf_counter() - began
        result = self.generate(prompt, question=question, **wishes)
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
        that this engine computes chunks behind; of a conversation, which some templates begin in
        another way, behind the prefix of its first turn."""
        if self.store is None or self.store.read_only:
            return ()
        missing = [s.segment for s in found if s.status == "miss"]
        talked = any(s.kind == "history" for s in prompt.segments)
        prefix, kind = prompt.prefix_ids, self.blueprint.context
        prefix = self.template.prefix if talked else prefix
        context = prefix if kind == "prefix" else self.template.context(kind)
        try:
            self.writer(context, prefix).write_missing(missing, saved=True)
        except CacheblendError as error:  # the answer is there; it must not be lost for this
            return (f"not every new chunk was stored: {error.message}",)
        return ()

    # What there is after an answer

    def _recorder(self, asked: Asked) -> Recorder | None:
        if asked.trace is None:
            return None
        about = self.model, self.tokenizer, self.store, self.codec, asked.trace
        return Recorder(*about, layers=asked.trace_layers, question=asked.question)

    def _finish(self, prompt: Prompt, asked: Asked, done: Done) -> AskResult:
        """The result of a prompt that was answered, with all that comes after an answer."""
        run, against, options = done.run, done.against, asked.blend
        audited, notes = self._audited(prompt, run, asked, against.same if against else None)
        reasons = account(self.store, self.spec, run.found, strict=options.strict_context)
        notes = run.notes + notes + miss_notes(reasons, saved=asked.save)
        notes += self._save_missing(prompt, run.found) if asked.save else ()
        load_s, self._load_s = self._load_s, 0.0  # counted with the first answer
        took = load_s + time.perf_counter() - done.began
        comparison = against.comparison(run, done.answer) if against is not None else None
        recorded = None
        if done.recorder is not None:
            recorded, more = self._record(prompt, options, done.recorder, done)
            notes += more
        beside = Beside(reasons, comparison, audited, notes, recorded, load_s, took)
        return answered(self.name, self.info, prompt, options, run, done.answer, beside)

    def _record(
        self, prompt: Prompt, options: BlendOptions, recorder: Recorder, done: Done
    ) -> tuple[Trace | None, tuple[str, ...]]:
        """The run's trace, and notes."""
        return recorder(prompt, options, done.run, done.happened)

    def _audited(
        self, prompt: Prompt, run: PrefillRun, asked: Asked, same: Agreement | None
    ) -> tuple[Audited | None, tuple[str, ...]]:
        """How far the answer's KV cache is from full prefill's, logged, if the prompt is due; and
        what the caller should be told. same: what is known of it already."""
        audit, options = asked.audit, asked.blend
        if audit is None or not run.used_stored_kv(options):
            return None, ()
        try:
            if not audit.is_due():
                return None, ()
            same = same or self._agreement(prompt, run, options)
            audited = Audited(same.kl_first, same.kl_mean, same.top1)
            audit.log.append(audit.record(self.info, prompt, run, options, audited))
        except (CacheblendError, RuntimeError, MemoryError) as error:
            # The answer is there, and must not be lost for this; torch's word for no memory left
            # is a RuntimeError.
            return None, (f"the prompt was not audited: {error}",)
        return audited, ()

    @abstractmethod
    def _agreement(self, prompt: Prompt, run: PrefillRun, options: BlendOptions) -> Agreement:
        """How a run that was answered agrees with a full prefill, which is done for it."""
