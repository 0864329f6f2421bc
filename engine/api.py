"""`Engine`: the Python API. Loads a model, precomputes chunks, answers prompts."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cache_store.errors import CacheblendError, UsageError
from cache_store.keys import chunk_id
from cache_store.misses import MissReason
from engine.audit import Audit
from engine.blueprint import Blueprint
from engine.codec import Codec
from engine.compare import FORCED_TOKENS, Agreement, agreement, first_divergence, reference
from engine.forward import forward
from engine.generate import Generated, generate
from engine.kv_cache import KVCache
from engine.lookups import account
from engine.lookups import notes as miss_notes
from engine.model import DTYPES, Decoder
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.precompute import ChunkWriter
from engine.prefill import Prefilled, Prefiller
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.results import (
    AskResult,
    Audited,
    Comparison,
    FirstToken,
    KVRecord,
    ModelInfo,
    PromptRecord,
    Recomputed,
    SegmentRecord,
    Timing,
)
from engine.rope import Tables
from engine.sources import KVStore, Source
from engine.threads import set_threads
from engine.timing import synchronize
from engine.trace.record import Level
from engine.trace.recorder import Recorder
from engine.trace.recording import Happened
from engine.weights import load_weights

TOP_LOGPROBS = 10


class Engine:
    """A model on a device, its prompt template, and the store that holds chunk KV.

    Not thread-safe; one engine answers one prompt at a time.
    """

    def __init__(
        self, model: Decoder, blueprint: Blueprint, *, store: KVStore | None = None
    ) -> None:
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
        self.prefill = Prefiller(model, store, self.spec)
        self._load_s = 0.0
        self._writer: ChunkWriter | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | Blueprint,
        *,
        store: KVStore | None = None,
        threads: int | None = None,
        **settings: Any,
    ) -> "Engine":
        """Loads a Hugging Face directory and warms it up.

        threads: of this process, which compute; None: see `engine.threads`. settings:
        `Blueprint.open`'s, where `model` is a directory. Raises NotFoundError, UsageError (not
        supported), IntegrityError (damaged).
        """
        began = time.perf_counter()
        set_threads(threads)
        blueprint = model if isinstance(model, Blueprint) else Blueprint.open(model, **settings)
        dtype = DTYPES[blueprint.dtype]
        weights = load_weights(blueprint.path, blueprint.config, blueprint.device, dtype)
        engine = cls(Decoder(blueprint.config, weights), blueprint, store=store)
        engine.warm_up()
        engine._load_s = time.perf_counter() - began
        return engine

    def warm_up(self) -> None:
        """Reads the weights and starts the kernels, so that the first prompt's time is its own."""
        ids = [self.model.config.vocab - 1] * min(64, self.model.config.context)
        cache = self.model.new_cache(len(ids))
        forward(self.model, cache, ids, self.model.rope.tables(len(ids)))
        synchronize(self.model.device)

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

    # Answers

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
        began = time.perf_counter()
        options, chosen = blend or BlendOptions(), sampling or SamplingOptions()
        recorder = None
        if trace is not None:
            about = self.model, self.tokenizer, self.store, self.codec, trace
            recorder = Recorder(*about, layers=trace_layers, question=question)
        checked = compare or audit is not None
        room = max(chosen.max_tokens, FORCED_TOKENS) if checked else chosen.max_tokens
        run = self.prefill(prompt, options, room=room, observer=observer)
        tell = observer.phase if observer is not None else lambda name: None
        full = same = compared = plain = None
        if compare:
            tell("compare")
            before = time.perf_counter()
            capture = recorder.full_kv if recorder is not None else None
            full = reference(
                *(self.model, prompt.token_ids, self.end_ids, run.cache.capacity), capture=capture
            )
            same = agreement(self.model, run.cache, run.tables, run.logits, full)
            compared = before, time.perf_counter()
        tell("decode")
        before = time.perf_counter()
        answer = self._decode(run.cache, run.tables, run.logits, chosen, on_text)
        decoded = before, time.perf_counter()
        tell("finish")
        comparison = None
        if full is not None and same is not None:
            plain = self._decode(full.cache, full.tables, full.logits[:1], chosen, None)
            comparison = Comparison(
                full.ttft_s,
                full.ttft_s / run.ttft_s,
                same.kl_first,
                same.kl_mean,
                same.top1,
                first_divergence(answer.token_ids, plain.token_ids),
                plain.text,
            )
        blending = options.mode == "blend"
        audited, notes = self._audited(prompt, run, options, audit, same)
        reasons = account(self.store, self.spec, run.found, strict=options.strict_context)
        notes = run.notes + notes + miss_notes(reasons, saved=save)
        notes += self._save_missing(prompt, run.found) if save else ()
        load_s, self._load_s = self._load_s, 0.0  # counted with the first answer
        took = load_s + time.perf_counter() - began
        recorded = None
        if recorder is not None:
            happened = Happened(answer.token_ids, decoded)
            if full is not None and same is not None and plain is not None:
                happened = Happened(
                    *(answer.token_ids, decoded, compared, plain.token_ids, full.tokens, same.kl)
                )
            recorded, more = recorder(prompt, options, run, happened)
            notes += more
        result = AskResult(
            answer=answer.text,
            finish_reason=answer.finish_reason,
            output_token_ids=answer.token_ids,
            model=self.info,
            mode=options.mode,
            policy=options.policy,
            ratios=tuple(float(ratio) for ratio in options.ratios) if blending else (),
            threshold=None if options.threshold is None else float(options.threshold),
            transfer=options.transfers,
            check_layers=options.check_layers if blending else (),
            skipped_blend=run.skipped,
            prompt=_prompt_record(prompt, run.used, reasons),
            recomputed=Recomputed(
                len(run.selected),
                len(run.selected) / run.cached_tokens if run.cached_tokens else 0.0,
                run.per_layer,
            ),
            first_token=_first_token(run.logits[0], answer),
            timing=Timing(
                load_model_s=load_s,
                tokenize_s=0.0,
                retrieve_s=0.0,
                ttft_s=run.ttft_s,
                kv_load_s=run.watch.load.seconds,
                kv_stall_s=run.watch.stall.seconds,
                rotate_s=run.watch.rotate.seconds,
                score_s=run.watch.score.seconds,
                recompute_s=run.watch.recompute.seconds,
                decode_s=answer.seconds,
                total_s=took,
                layers=tuple(run.watch.layers),
            ),
            kv=KVRecord.of(run.tiers),
            compare=comparison,
            audit=audited,
            selected=run.selected,
            notes=notes,
            trace=recorded,
        )
        return result.timed(result.timing)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return self.model.config.eos_ids

    def _decode(
        self,
        cache: KVCache,
        tables: Tables,
        logits: torch.Tensor,
        sampling: SamplingOptions,
        on_text: Callable[[str], None] | None,
    ) -> Generated:
        stream = self.tokenizer.stream()
        return generate(self.model, cache, tables, logits, sampling, stream, self.end_ids, on_text)

    def _audited(
        self,
        prompt: Prompt,
        run: Prefilled,
        options: BlendOptions,
        audit: Audit | None,
        same: Agreement | None,
    ) -> tuple[Audited | None, tuple[str, ...]]:
        """How far the answer's KV cache is from full prefill's, logged, if the prompt is due; and
        what the caller should be told. same: what is known of it already."""
        if audit is None or not _used_stored_kv(run, options):
            return None, ()
        try:
            if not audit.is_due():
                return None, ()
            if same is None:
                run.cache.length = len(prompt.token_ids)  # the answer's rows are overwritten
                full = reference(self.model, prompt.token_ids, self.end_ids, run.cache.capacity)
                same = agreement(self.model, run.cache, run.tables, run.logits, full)
            audited = Audited(same.kl_first, same.kl_mean, same.top1)
            audit.log.append(audit.record(self.info, prompt, run, options, audited))
        except (CacheblendError, RuntimeError, MemoryError) as error:
            # The answer is there, and must not be lost for this; torch's word for no memory left
            # is a RuntimeError.
            return None, (f"the prompt was not audited: {error}",)
        return audited, ()

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


def _prompt_record(
    prompt: Prompt, sources: Sequence[Source], reasons: Sequence[MissReason | None]
) -> PromptRecord:
    return PromptRecord(
        prompt.token_ids,
        tuple(
            SegmentRecord(
                s.segment.kind,
                s.segment.chunk_id,
                s.segment.source,
                s.segment.start,
                s.segment.end,
                s.status,
                reason if s.status == "miss" else None,
            )
            for s, reason in zip(sources, reasons, strict=True)
        ),
    )


def _used_stored_kv(run: Prefilled, options: BlendOptions) -> bool:
    """Whether the run is an approximation, and not a full prefill or an exact leading part."""
    approximate = options.mode in ("blend", "reuse") and not options.computes_all
    return approximate and not run.skipped and run.cached_tokens > 0


def _first_token(logits: torch.Tensor, answer: Generated) -> FirstToken:
    values, ids = logits.log_softmax(-1).topk(min(TOP_LOGPROBS, len(logits)))
    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return FirstToken(answer.first_id, pairs)
