"""The vLLM of this process: requests in, tokens out, and what the connector made of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cache_store.errors import CacheblendError
from engine.blueprint import Blueprint
from engine.options import BlendOptions, SamplingOptions
from engine.prompt import Prompt, Segment
from engine.sources import KVStore
from engine.vllm.request import LocalRequest, parameters
from engine.vllm.start import LocalSettings, start
from engine.vllm.worker import BlendRun

if TYPE_CHECKING:
    from engine.vllm.decoder import VllmDecoder
    from engine.vllm.plan import BlendPlan

WARM_UP_TOKENS = 64


class VllmProcess:
    """Starts vLLM; one a process. Raises as `engine.vllm.start.start` does."""

    def __init__(self, blueprint: Blueprint, settings: LocalSettings) -> None:
        # The connector opens a store of its own, which is never used: see `use`.
        self._folder = tempfile.TemporaryDirectory(prefix="cacheblend-vllm-")
        self._requests: dict[str, LocalRequest] = {}
        self._number = 0
        self.blueprint = blueprint
        try:
            self._engine: Any = start(blueprint, Path(self._folder.name) / "store", settings)
        except BaseException:
            self._folder.cleanup()
            raise
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler.connector
        self._worker: Any = get_kv_transfer_group()
        self._worker.steps.listeners.append(self)
        if self._worker.off is not None or self._worker.steps.worker is None:
            self.close()
            raise CacheblendError(
                f"vLLM cannot blend {blueprint.name}: {self._worker.off}", "use --engine torch"
            )
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._layers: Any = runner.get_model().model.layers
        self._watch: Any = _watch_of(runner)
        self.length: int = self._engine.model_config.max_model_len
        self._warm_up()

    @property
    def decoder(self) -> VllmDecoder:
        """vLLM's model, to compute chunks with."""
        found: VllmDecoder = self._worker.steps.worker.model
        return found

    def use(self, store: KVStore, loader: str) -> None:
        """What is blended from, from now on, and how it is loaded."""
        self._scheduler.use(cast(KVStore, _Uncounted(store)), loader)
        self._worker.use(store, loader)

    def submit(self, request: LocalRequest) -> None:
        """Gives vLLM a request; its time to the first token begins here."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from engine.vllm.watching import PARAMETER

        self._number += 1
        name = str(self._number)
        self._watch.watched[name] = request.watched
        s = request.sampling
        extra: dict[str, Any] = {PARAMETER: name}
        told = parameters(request.prompt, request.options)
        if told:
            extra["kv_transfer_params"] = told
        params = SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            seed=s.seed if s.temperature else None,
            max_tokens=min(s.max_tokens, self.length - len(request.prompt.token_ids)),
            ignore_eos=True,
            stop_token_ids=list(request.end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra,
        )
        ids = {"prompt_token_ids": list(request.prompt.token_ids)}
        inner = self._engine.add_request(name, ids, params)
        self._requests[inner] = request

    def step(self) -> None:
        """One forward of vLLM, and what it gave to each request."""
        outputs = self._engine.step()
        by_name = {key.partition("-")[0]: key for key in self._requests}
        for output in outputs:
            key = by_name.get(output.request_id.partition("-")[0])
            if key is None:
                continue
            request = self._requests[key]
            tokens = list(output.outputs[0].token_ids) if output.outputs else []
            if request.take(tokens, output.finished):
                self._engine.abort_request([key], internal=True)
            if request.done:
                self._forget(key)

    def run(self, request: LocalRequest) -> None:
        """One request, from its beginning to its end."""
        self.submit(request)
        try:
            while not request.done:
                self.step()
        except BaseException:
            self.abort(request)
            raise

    def abort(self, request: LocalRequest) -> None:
        """Gives up a request."""
        keys = [key for key, one in self._requests.items() if one is request]
        for key in keys:
            self._engine.abort_request([key], internal=True)
            self._forget(key)

    def _forget(self, key: str) -> None:
        del self._requests[key]
        self._watch.watched.pop(key.partition("-")[0], None)

    @contextmanager
    def layers_timed(self, request: LocalRequest) -> Iterator[None]:
        """Tells a request's own stopwatch when each layer of vLLM's model begins, as long as it is
        the only one; vLLM's compiled model doesn't tell."""
        handles = [
            layer.register_forward_pre_hook(
                lambda module, args, index=index: request.layer_begins(index)
            )
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        """Ends vLLM."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

        self._engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()  # so that another one can be started
        self._folder.cleanup()

    # As `engine.vllm.tracing.RunListener`.

    def ran(self, run: BlendRun) -> None:
        request = self._requests.get(run.plan.request.request_id)
        if request is not None:
            request.blend = run

    def failed(self, plan: BlendPlan, error: Exception) -> None:
        request = self._requests.get(plan.request.request_id)
        if request is not None:
            request.failure = error

    def _warm_up(self) -> None:
        """One short prompt, so that the first one's time is its own."""
        from engine.vllm.watching import Watched

        count = max(1, min(WARM_UP_TOKENS, self.length - 2))
        ids = (self.blueprint.config.vocab - 1,) * count
        prompt = Prompt((Segment("suffix", ids, 0),))
        options = BlendOptions(mode="full")
        self.run(LocalRequest(prompt, options, SamplingOptions(max_tokens=1), Watched(0)))


class _Uncounted:
    """A store where lookups of the connector's are not counted, and what it has to say is not
    heard: the engine counts an answer's own, once, and tells the rest."""

    damaged: Sequence[str] = ()

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.counters = _Counters()

    def note_uses(self) -> None:
        return

    def take_notes(self) -> list[str]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Counters:
    def add(self, name: str, number: int = 1) -> None:
        return

    def flush(self) -> None:
        return


def _watch_of(runner: Any) -> Any:
    from engine.vllm.watching import LogitsWatch

    found = [p for p in runner.input_batch.logitsprocs.all if isinstance(p, LogitsWatch)]
    return found[0]
