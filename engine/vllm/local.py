"""`VllmEngine`: the same answers as `engine.api.Engine`, computed by a vLLM in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache_store.errors import UsageError
from engine.answered import Against, Done
from engine.asked import Asked
from engine.base import BaseEngine
from engine.blend import check_indices
from engine.blueprint import Blueprint
from engine.compare import FORCED_TOKENS, Agreement, agreement_of
from engine.generate import Answer, Generated
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import PrefillRun
from engine.prompt import Prompt
from engine.results import AskResult
from engine.sources import KVStore, find_sources
from engine.threads import set_threads
from engine.trace.record import Trace
from engine.trace.recorder import Recorder
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
        asked = Asked(self.request.options, self.request.sampling, save=save)
        return self.engine.finish(self.request, began, asked)


class VllmEngine(BaseEngine):
    """The engine whose model, scheduler and kernels are vLLM's. There is one a process."""

    name = "vllm"

    def __init__(
        self, process: VllmProcess, blueprint: Blueprint, store: KVStore | None, load_s: float = 0
    ) -> None:
        super().__init__(process.decoder, blueprint, store)
        self.process = process
        self._load_s = load_s

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

    def _generate(self, prompt: Prompt, asked: Asked) -> AskResult:
        if asked.observer is not None:
            raise UsageError("a run in vLLM cannot be watched", "leave out --live")
        began = time.perf_counter()
        recorder = self._recorder(asked)
        if asked.blend.indices is not None:
            self._check_indices(prompt, asked.blend)
        request = self._request(prompt, asked.blend, asked.sampling)
        stream = self.tokenizer.stream()
        request.answer = Answer(asked.sampling, stream, self.end_ids, asked.on_text)
        if recorder is None:
            self._run(request)
        else:
            with self.process.layers_timed(request):
                self._run(request)
        return self.finish(request, began, asked, recorder)

    def finish(
        self, request: LocalRequest, began: float, asked: Asked, recorder: Recorder | None = None
    ) -> AskResult:
        """The result of a request that is done, with all that comes after an answer. began:
        `time.perf_counter` when work on it began."""
        if isinstance(request.failure, UsageError):
            raise request.failure
        prompt, options, chosen = request.prompt, request.options, request.sampling
        run, answer, against = self._outcome(request), self._answer(request), None
        if asked.compare:
            before = time.perf_counter()
            most = chosen.max_tokens if chosen.temperature == 0 else 0
            full = self.reference(prompt, most=most)
            same = self.along(prompt, options, full)[1]
            span = before, time.perf_counter()
            plain = self._plain(prompt, chosen, full)
            against = Against(full.ttft_s, full.tokens, same, plain, span)
        decode = request.watched.first_at, request.ended
        return self._finish(prompt, asked, Done(run, answer, began, decode, against, recorder))

    def _record(
        self, prompt: Prompt, options: BlendOptions, recorder: Recorder, done: Done
    ) -> tuple[Trace | None, tuple[str, ...]]:
        if done.run.watch.starts:
            return super()._record(prompt, options, recorder, done)
        return None, (
            "the run was not recorded: vLLM's compiled model does not tell its layers' times "
            "(--vllm enforce_eager=true)",
        )

    def _agreement(self, prompt: Prompt, run: PrefillRun, options: BlendOptions) -> Agreement:
        return self.along(prompt, options, self.reference(prompt))[1]

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
