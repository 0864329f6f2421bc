"""Running questions from the view: one thread that the runner lives in, and what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cbcli.inspect.runner import Cancelled, Runner, StoredChunk, Wish
from engine.trace.record import Trace


class Session:
    """The runner in its thread, where it is made with the first call. `said` is what the run under
    way says; "" where there was none."""

    def __init__(self, make: Callable[[], Runner]) -> None:
        self._make = make
        self._made: Runner | None = None
        self.said = ""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")
        self._cancelled = threading.Event()
        self._future: Future[Trace] | None = None

    def chunks(self) -> Future[Sequence[StoredChunk]]:
        return self._pool.submit(lambda: self._runner().chunks())

    def _runner(self) -> Runner:
        if self._made is None:
            self._made = self._make()
        return self._made

    def run(self, wish: Wish) -> Future[Trace]:
        """Begins a run; its future raises Cancelled where it was cancelled meanwhile."""
        self._cancelled = cancelled = threading.Event()
        self.said = "waits for what was cancelled to end"
        self._future = self._pool.submit(self._run, wish, cancelled)
        return self._future

    def _run(self, wish: Wish, cancelled: threading.Event) -> Trace:
        def say(text: str) -> None:
            if cancelled.is_set():
                raise Cancelled
            self.said = text

        say("begins")
        trace = self._runner().run(wish, say)
        say("done")
        return trace

    def cancel(self) -> None:
        """The run under way counts no more; it ends where it next says something."""
        self._cancelled.set()

    @property
    def busy(self) -> bool:
        """Whether something is still being computed."""
        return self._future is not None and not self._future.done()

    def close(self) -> None:
        self.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
