"""Who learns of each blend in a worker, and the traces of vLLM's server, which workers write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import platformdirs

from engine.vllm.text import one_line

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.model import Decoder
    from engine.sources import KVStore
    from engine.vllm.plan import BlendPlan
    from engine.vllm.settings import ConnectorSettings
    from engine.vllm.worker import BlendRun

KEPT = 10  # of the last traces, in the usual folder
_WAITING = 4  # that are not written yet; further ones are left out


class RunListener(Protocol):
    """Told in the worker's process, before vLLM's own forward: what is done here adds to the time
    of all requests of the step. What it raises is taken for the blend's own failure."""

    def ran(self, run: BlendRun) -> None:
        """A request's KV is in its blocks."""

    def failed(self, plan: BlendPlan, error: Exception) -> None:
        """It is not; vLLM computes the request."""


def traces_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Where the command keeps the last traces, and looks for them."""
    home = env.get("CACHEBLEND_HOME")
    if home:
        return Path(home).expanduser().absolute() / "traces"
    return platformdirs.user_state_path("cacheblend") / "traces"


class TraceWriter:
    """Writes the trace of each request that is to have one. It ends where vLLM goes on: a worker
    learns of no answer.

    To a folder that is named every trace is written, in the usual one the last few are kept. warn:
    takes a line for the log. whole: whether this worker has the whole model, without which level
    `full` measures nothing and is `basic`.
    """

    def __init__(
        self,
        model: Decoder,
        blueprint: Blueprint,
        store: Callable[[], KVStore],
        settings: ConnectorSettings,
        warn: Callable[[str], None],
        *,
        whole: bool = True,
    ) -> None:
        self.model, self.blueprint, self.store = model, blueprint, store
        self.settings, self._warn, self._whole = settings, warn, whole
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    def ran(self, run: BlendRun) -> None:
        level = run.plan.request.trace
        if level is None:
            return
        if level == "full" and self._whole:  # which computes: not beside vLLM
            self._write(run)
        elif self._waiting < _WAITING:
            self._waiting += 1
            try:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "cacheblend-traces")
                self._thread.submit(self._write, run)
            except Exception as error:  # raised here, it would part this rank from the others
                self._waiting -= 1
                self._warn(f"a run was not recorded: {one_line(error)}")

    def failed(self, plan: BlendPlan, error: Exception) -> None:
        return

    def close(self) -> None:
        """Waits until all are written."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, run: BlendRun) -> None:
        try:
            self._record(run)
        except Exception as error:  # a trace is worth no request
            self._warn(f"a run was not recorded: {type(error).__name__}: {one_line(error)}")
        finally:
            self._waiting = max(0, self._waiting - 1)

    def _record(self, run: BlendRun) -> None:
        from engine.answered import Beside, answered
        from engine.codec import Codec
        from engine.results import ModelInfo
        from engine.trace.file import SUFFIX, write
        from engine.trace.kept import keep
        from engine.trace.recorder import Recorder
        from engine.trace.recording import Happened
        from engine.vllm.outcome import of_blend

        request, blueprint, model = run.plan.request, self.blueprint, self.model
        level = request.trace if self._whole else "basic"
        assert level is not None
        codec = Codec.of(blueprint.spec, model.dtype)
        layers = self.settings.trace_layers
        record = Recorder(model, blueprint.tokenizer, self.store(), codec, level, layers=layers)
        made, ended = of_blend(run), run.watch.began + run.seconds
        happened = Happened((), (ended, ended))
        trace, notes = record(request.prompt, request.options, made, happened)
        for note in notes:
            self._warn(note)
        if trace is None:
            return
        info = ModelInfo(
            blueprint.name,
            blueprint.spec.model,
            blueprint.dtype,
            blueprint.kv_dtype,
            str(model.device),
        )
        none = (None,) * len(made.used)
        beside = Beside(none, None, None, made.notes, trace, 0.0, run.seconds)
        done = answered("vllm", info, request.prompt, request.options, made, None, beside).trace
        assert done is not None
        folder = self.settings.trace_dir
        if folder is None:
            keep(done, traces_folder(), KEPT)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write(done, folder / (done.id + SUFFIX))
