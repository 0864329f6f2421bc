"""Work after prompts, in one thread of its own, and prompts that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Background:
    """Runs jobs one after the other. `at_end` is called in the thread when it is through."""

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._at_end = at_end
        self._lock = threading.Lock()
        self._jobs: set[Future[None]] = set()
        self._used = False
        self.closing = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Has a job done; False where it is too late for that."""
        with self._lock:
            if self.closing:
                return False
            self._used = True
            future = self._pool.submit(job)
            self._jobs.add(future)
        future.add_done_callback(self._ended)
        return True

    def _ended(self, future: Future[None]) -> None:
        with self._lock:
            self._jobs.discard(future)

    def settle(self, seconds: float | None = None) -> None:
        """Waits for what was submitted until now."""
        with self._lock:
            jobs = list(self._jobs)
        wait(jobs, timeout=seconds)

    def close(self, seconds: float) -> None:
        """Waits so long at most; what has not begun by then is left out. Jobs can tell by `closing`
        that they should end soon."""
        self.settle(seconds)
        with self._lock:
            self.closing = True
            jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        if self._used:
            self._pool.submit(self._at_end)
        self._pool.shutdown(wait=True)


class UnderWay:
    """How many readers are open."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._number = 0

    def begin(self) -> None:
        with self._change:
            self._number += 1

    def end(self) -> None:
        with self._change:
            self._number -= 1
            self._change.notify_all()

    def wait_for_none(self, seconds: float) -> None:
        """Until there is none, or so long."""
        with self._change:
            self._change.wait_for(lambda: not self._number, seconds)
