"""`VllmEngine`: the same answers as `engine.api.Engine`, computed by a vLLM in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cache_store.errors import CacheblendError, UsageError
from engine.answered import Beside, answered
from engine.audit import Audit
from engine.base import BaseEngine
from engine.blend import check_indices
from engine.blueprint import Blueprint
from engine.compare import FORCED_TOKENS, Agreement, agreement_of, first_divergence
from engine.generate import Answer, Generated
from engine.lookups import account
from engine.lookups import notes as miss_notes
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import PrefillRun
from engine.prompt import Prompt
from engine.results import AskResult, Audited, Comparison
from engine.sources import KVStore, find_sources
from engine.threads import set_threads
from engine.trace.record import Level
from engine.trace.recorder import Recorder
from engine.trace.recording import Happened
from engine.vllm.outcome import outcome
from engine.vllm.process import VllmProcess
from engine.vllm.request import LocalRequest
from engine.vllm.start import LocalSettings

FULL = BlendOptions(mode="full")


@dataclass(frozen=True)
class Reference:
    """A prompt's full prefill by vLLM and its greedy continuation: see `engine.compare.Reference`.
    all_tokens: as far as it was asked to go on."""

    ttft_s: float
    logits: torch.Tensor
    tokens: tuple[int, ...]
    all_tokens: tuple[int, ...]


@dataclass(frozen=True)
class LocalAnswer:
    """One of several requests that are computed together."""

    engine: VllmEngine
    request: LocalRequest

    @property
    def done(self) -> bool:
        return self.request.done

    def finish(self, began: float, *, save: bool) -> AskResult:
        return self.engine.finish(self.request, began, save=save)


class VllmEngine(BaseEngine):
    """The engine whose model, scheduler and kernels are vLLM's. There is one a process."""

    name = "vllm"

    def __init__(
        self, process: VllmProcess, blueprint: Blueprint, store: KVStore | None, load_s: float = 0
    ) -> None:
        super().__init__(process.decoder, blueprint, store)
        self.process, self._load_s = process, load_s

    @classmethod
    def load(
        cls,
        blueprint: Blueprint,
        *,
        store: KVStore | None = None,
        settings: LocalSettings | None = None,
    ) -> VllmEngine:
        """Starts vLLM with the model. Raises as `engine.vllm.start.start`."""
        began = time.perf_counter()
        settings = settings or LocalSettings()
        set_threads(settings.threads)
        process = VllmProcess(blueprint, settings)
        return cls(process, blueprint, store, time.perf_counter() - began)

    def over(self, store: KVStore | None) -> VllmEngine:
        return VllmEngine(self.process, self.blueprint, store)

    def close(self) -> None:
        self.process.close()

    # Requests

    def prefill(self, prompt: Prompt, options: BlendOptions, room: int = 0) -> PrefillRun:
        request = self._request(prompt, options, SamplingOptions(max_tokens=1))
        self._run(request)
        return self._outcome(request)

    def reference(self, prompt: Prompt, tokens: int = FORCED_TOKENS, most: int = 0) -> Reference:
        """A full prefill and its greedy continuation, up to `tokens` compared and `most` in all."""
        wanted = SamplingOptions(max_tokens=max(tokens, most))
        request = self._request(prompt, FULL, wanted, keep=tokens)
        self._run(request)
        logits, found = request.watched.stacked(), tuple(request.tokens)
        ttft = request.watched.first_at - request.began
        return Reference(ttft, logits[: len(found)], found[:tokens], found)

    def along(
        self, prompt: Prompt, options: BlendOptions, full: Reference
    ) -> tuple[PrefillRun, Agreement]:
        """The same prompt in another way, its answer forced to be full prefill's: token by token as
        that was, for another number of rows rounds otherwise."""
        count = len(full.tokens)
        sampling = SamplingOptions(max_tokens=count)
        request = self._request(prompt, options, sampling, keep=count, forced=full.tokens)
        self._run(request)
        return self._outcome(request), agreement_of(full.logits, request.watched.stacked())

    def answer_alone(
        self, prompt: Prompt, options: BlendOptions, sampling: SamplingOptions
    ) -> Generated:
        """An answer and nothing else."""
        request = self._request(prompt, options, sampling)
        request.answer = Answer(sampling, self.tokenizer.stream(), self.end_ids)
        self._run(request)
        return self._answer(request)

    def begin(self, prompt: Prompt, blend: BlendOptions, sampling: SamplingOptions) -> LocalAnswer:
        request = self._request(prompt, blend, sampling)
        request.answer = Answer(sampling, self.tokenizer.stream(), self.end_ids)
        self._check(request)
        self._look_ahead(prompt, blend)
        request.began = time.perf_counter()
        self.process.submit(request)
        return LocalAnswer(self, request)

    def go_on(self) -> None:
        self.process.step()

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
        if observer is not None:
            raise UsageError("a run in vLLM cannot be watched", "leave out --live")
        began = time.perf_counter()
        options, chosen = blend or BlendOptions(), sampling or SamplingOptions()
        recorder = None
        if trace is not None:
            about = self.model, self.tokenizer, self.store, self.codec, trace
            recorder = Recorder(*about, layers=trace_layers, question=question)
        if options.indices is not None:
            self._check_indices(prompt, options)
        request = self._request(prompt, options, chosen)
        request.answer = Answer(chosen, self.tokenizer.stream(), self.end_ids, on_text)
        if recorder is None:
            self._run(request)
        else:
            with self.process.layers_timed(request):
                self._run(request)
        return self.finish(
            request, began, compare=compare, audit=audit, save=save, recorder=recorder
        )

    def finish(
        self,
        request: LocalRequest,
        began: float,
        *,
        compare: bool = False,
        audit: Audit | None = None,
        save: bool = True,
        recorder: Recorder | None = None,
    ) -> AskResult:
        """The result of a request that is done, with all that comes after an answer. began:
        `time.perf_counter` when work on it began."""
        prompt, options, chosen = request.prompt, request.options, request.sampling
        if isinstance(request.failure, UsageError):
            raise request.failure
        run, answer = self._outcome(request), self._answer(request)
        comparison = same = full = plain = compared = None
        if compare:
            before = time.perf_counter()
            most = chosen.max_tokens if chosen.temperature == 0 else 0
            full = self.reference(prompt, most=most)
            same = self.along(prompt, options, full)[1]
            compared = before, time.perf_counter()
            plain = self._plain(prompt, chosen, full)
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
            decoded = request.watched.first_at, request.ended
            happened = Happened(answer.token_ids, decoded)
            if full is not None and same is not None and plain is not None:
                happened = Happened(
                    *(answer.token_ids, decoded, compared, plain.token_ids, full.tokens, same.kl)
                )
            if run.watch.starts:
                recorded, more = recorder(prompt, options, run, happened)
            else:
                more = (
                    "the run was not recorded: vLLM's compiled model does not tell its layers' "
                    "times (--vllm enforce_eager=true)",
                )
            notes += more
        beside = Beside(reasons, comparison, audited, notes, recorded, load_s, took)
        return answered(self.name, self.info, prompt, options, run, answer, beside)

    # What it is made of.

    def _request(
        self,
        prompt: Prompt,
        options: BlendOptions,
        sampling: SamplingOptions,
        keep: int = 1,
        forced: Sequence[int] = (),
    ) -> LocalRequest:
        from engine.vllm.watching import Watched

        watched = Watched(keep, forced)
        return LocalRequest(prompt, options, sampling, watched, end_ids=self.end_ids)

    def _run(self, request: LocalRequest) -> None:
        """Checks a request and answers it."""
        self._check(request)
        self._look_ahead(request.prompt, request.options)
        request.began = time.perf_counter()
        self.process.run(request)
        if isinstance(request.failure, UsageError):
            raise request.failure

    def _check(self, request: LocalRequest) -> None:
        """Raises UsageError."""
        request.options.check_model(self.model.config.layers)
        length, context = len(request.prompt.token_ids), self.process.length
        if length >= context:
            limit = context < self.model.config.context
            raise UsageError(
                f"a prompt of {length} tokens leaves no room in "
                + (f"the {context} tokens vLLM was started with" if limit else "the model's ")
                + ("" if limit else f"context of {context}"),
                "use fewer or smaller chunks (--top-k, --chunk), or a shorter question",
            )
        if self.store is not None:
            self.process.use(self.store, request.options.loader)

    def _check_indices(self, prompt: Prompt, options: BlendOptions) -> None:
        """Raises UsageError for explicit positions outside the cached tokens: before an answer is
        streamed."""
        regime = self.model.rope.regime(len(prompt.token_ids))
        found = find_sources(
            *(prompt, self.store, self.spec, regime, options.mode, options.strict_context)
        )
        places = [range(s.segment.start, s.segment.end) for s in found if s.cached]
        check_indices(options.indices or (), [p for place in places for p in place])

    def _look_ahead(self, prompt: Prompt, options: BlendOptions) -> None:
        if self.store is not None and options.mode != "full":
            chunks = [s.token_ids for s in prompt.segments if s.kind in ("prefix", "chunk")]
            self.store.look_ahead(self.spec, chunks, None)

    def _outcome(self, request: LocalRequest) -> PrefillRun:
        return outcome(request, self.store, self.spec, self.model)

    def _answer(self, request: LocalRequest) -> Generated:
        assert request.answer is not None
        return request.answer.finish(lambda: request.ended - request.watched.first_at)

    def _plain(self, prompt: Prompt, sampling: SamplingOptions, full: Reference) -> Generated:
        """Full prefill's own answer."""
        if sampling.temperature == 0:
            answer = Answer(sampling, self.tokenizer.stream(), self.end_ids)
            for token in full.all_tokens[: sampling.max_tokens]:
                if answer.push(token):
                    break
            return answer.finish(lambda: 0.0)
        return self.answer_alone(prompt, FULL, sampling)

    def _audited(
        self,
        prompt: Prompt,
        run: PrefillRun,
        options: BlendOptions,
        audit: Audit | None,
        same: Agreement | None,
    ) -> tuple[Audited | None, tuple[str, ...]]:
        """As the torch engine's."""
        if audit is None or not run.used_stored_kv(options):
            return None, ()
        try:
            if not audit.is_due():
                return None, ()
            if same is None:
                same = self.along(prompt, options, self.reference(prompt))[1]
            audited = Audited(same.kl_first, same.kl_mean, same.top1)
            audit.log.append(audit.record(self.info, prompt, run, options, audited))
        except (CacheblendError, RuntimeError, MemoryError) as error:
            return None, (f"the prompt was not audited: {error}",)
        return audited, ()
