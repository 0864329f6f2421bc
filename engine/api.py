"""`Engine`: the Python API. Loads a model, precomputes chunks, answers prompts."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cache_store.errors import CacheblendError
from engine.answered import Beside, answered
from engine.audit import Audit
from engine.base import BaseEngine
from engine.blueprint import Blueprint
from engine.compare import FORCED_TOKENS, Agreement, agreement, first_divergence, reference
from engine.forward import forward
from engine.generate import Generated, generate
from engine.kv_cache import KVCache
from engine.lookups import account
from engine.lookups import notes as miss_notes
from engine.model import DTYPES, Decoder
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import Prefilled, Prefiller
from engine.prompt import Prompt
from engine.results import AskResult, Audited, Comparison
from engine.rope import Tables
from engine.sources import KVStore
from engine.threads import set_threads
from engine.timing import synchronize
from engine.trace.record import Level
from engine.trace.recorder import Recorder
from engine.trace.recording import Happened
from engine.weights import load_weights


class Engine(BaseEngine):
    """The engine that computes with torch alone, in this process."""

    name = "torch"

    def __init__(
        self, model: Decoder, blueprint: Blueprint, *, store: KVStore | None = None
    ) -> None:
        super().__init__(model, blueprint, store)
        self.prefiller = Prefiller(model, store, self.spec)
        self._load_s = 0.0

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

    def over(self, store: KVStore | None) -> "Engine":
        return Engine(self.model, self.blueprint, store=store)

    def prefill(
        self,
        prompt: Prompt,
        options: BlendOptions,
        room: int = 0,
        observer: Observer | None = None,
    ) -> Prefilled:
        return self.prefiller(prompt, options, room, observer)

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
        beside = Beside(reasons, comparison, audited, notes, recorded, load_s, took)
        return answered(self.name, self.info, prompt, options, run, answer, beside)

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
        if audit is None or not run.used_stored_kv(options):
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
