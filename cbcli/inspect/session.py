"""Running questions from the view: one thread that the runner lives in, and what it says."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

from cbcli.inspect.runner import CONTEXTS, Cancelled, Runner, StoredChunk, Wish
from engine.trace.record import Trace

GRACE = 0.2  # seconds that leaving waits for what is about to end


class Session:
    """The runner in its thread, where it is made with the first call. `said` is what the run under
    way says; "" where there was none. context: what missing chunks are computed behind, as set."""

    def __init__(self, make: Callable[[], Runner], context: str = CONTEXTS[0]) -> None:
        self.context = context
        self._make = make
        self._made: Runner | None = None
        self.said = ""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")
        self._cancelled = threading.Event()
        self._last: Future[Any] | None = None  # the thread does one after the other

    def chunks(self) -> Future[Sequence[StoredChunk]]:
        self._last = found = self._pool.submit(lambda: self._runner().chunks())
        return found

    def _runner(self) -> Runner:
        if self._made is None:
            self._made = self._make()
        return self._made

    def run(self, wish: Wish) -> Future[Trace]:
        """Begins a run; its future raises Cancelled where it was cancelled meanwhile."""
        self._cancelled = cancelled = threading.Event()
        self.said = "waits for what was cancelled to end"
        self._last = found = self._pool.submit(self._run, wish, cancelled)
        return found

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
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        self.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def leave(self, code: int) -> NoReturn:
        """Ends the process, without waiting for the run under way: what that would have given
        nobody sees, and a store is sound whenever a process ends. Raises SystemExit where no run
        is."""
        self.close()
        try:
            if self._last is not None:
                self._last.exception(timeout=GRACE)
        except TimeoutError:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)  # at its end Python would wait for the thread
        except (CancelledError, Cancelled):
            pass
        sys.exit(code)
