"""`Engine`: the Python API. Loads a model, precomputes chunks, answers prompts."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch

from engine.answered import Against, Done
from engine.asked import Asked, Wishes
from engine.base import BaseEngine
from engine.blueprint import Blueprint
from engine.compare import Agreement, agreement, reference
from engine.forward import forward
from engine.generate import Generated, generate
from engine.kv_cache import KVCache
from engine.model import DTYPES, Decoder
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import Prefilled, Prefiller, PrefillRun
from engine.prompt import Prompt
from engine.results import AskResult
from engine.rope import Tables
from engine.sources import KVStore
from engine.threads import set_threads
from engine.timing import synchronize
from engine.weights import load_weights


class Engine(BaseEngine):
    """The engine that computes with torch alone, in this process."""

    name = "torch"

    def __init__(
        self, model: Decoder, blueprint: Blueprint, *, store: KVStore | None = None
    ) -> None:
        super().__init__(model, blueprint, store)
        self.prefiller = Prefiller(model, store, self.spec)

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
        cache: KVCache | None = None,
    ) -> Prefilled:
        """cache: as of `engine.prefill.Prefiller`."""
        return self.prefiller(prompt, options, room, observer, cache)

    def generate_in(
        self,
        cache: KVCache,
        prompt: Prompt,
        interrupted: Callable[[], bool] = lambda: False,
        **wishes: Unpack[Wishes],
    ) -> AskResult:
        """`generate` in a KV cache that holds what the prompt begins with, see
        `engine.prefill.Prefiller`; then it holds all but the answer's last token, or the prompt
        alone where it was audited. interrupted: asked before each token whether the answer is to
        end."""
        return self._generate(prompt, Asked.of(wishes), cache, interrupted)

    def _generate(
        self,
        prompt: Prompt,
        asked: Asked,
        cache: KVCache | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> AskResult:
        began = time.perf_counter()
        recorder, observer = self._recorder(asked), asked.observer
        run = self.prefill(prompt, asked.blend, room=asked.room, observer=observer, cache=cache)
        tell = observer.phase if observer is not None else lambda name: None
        full = same = None
        span = 0.0, 0.0
        if asked.compare:
            tell("compare")
            before = time.perf_counter()
            capture = recorder.full_kv if recorder is not None else None
            full = reference(
                *(self.model, prompt.token_ids, self.end_ids, run.cache.capacity), capture=capture
            )
            same = agreement(self.model, run.cache, run.tables, run.logits, full)
            span = before, time.perf_counter()
        tell("decode")
        before = time.perf_counter()
        end = asked.on_text, interrupted
        answer = self._decode(run.cache, run.tables, run.logits, asked.sampling, *end)
        decode = before, time.perf_counter()
        tell("finish")
        against = None
        if full is not None and same is not None:
            plain = self._decode(full.cache, full.tables, full.logits[:1], asked.sampling, None)
            against = Against(full.ttft_s, full.tokens, same, plain, span)
        return self._finish(prompt, asked, Done(run, answer, began, decode, against, recorder))

    def _decode(
        self,
        cache: KVCache,
        tables: Tables,
        logits: torch.Tensor,
        sampling: SamplingOptions,
        on_text: Callable[[str], None] | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generated:
        stream, ends = self.tokenizer.stream(), self.end_ids
        return generate(
            self.model, cache, tables, logits, sampling, stream, ends, on_text, interrupted
        )

    def _agreement(self, prompt: Prompt, run: PrefillRun, options: BlendOptions) -> Agreement:
        assert isinstance(run, Prefilled)
        run.cache.length = len(prompt.token_ids)  # the answer's rows are overwritten
        full = reference(self.model, prompt.token_ids, self.end_ids, run.cache.capacity)
        return agreement(self.model, run.cache, run.tables, run.logits, full)
