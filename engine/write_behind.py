"""Work done in the background, in order, while the caller prepares the next piece."""

import queue
import threading
from collections.abc import Iterable
from types import TracebackType


class WriteBehind:
    """Runs jobs one after the other in a thread of their own.

    A context manager. Leaving it waits for all jobs; left by an interrupt, or interrupted while it
    waits, it ends once the step being done is through. The first error of a job ends everything
    that was to come after it, and is raised by the next `submit` or on leaving.
    """

    def __init__(self, depth: int) -> None:
        """depth: jobs that may be unfinished at a time; `submit` waits for room."""
        self._room = threading.BoundedSemaphore(depth)
        self._jobs: queue.SimpleQueue[Iterable[object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._stopped = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="write-behind", daemon=True)

    def submit(self, steps: Iterable[object]) -> None:
        """Has `steps` iterated over, after everything submitted before."""
        self._room.acquire()
        if self._error is not None:
            raise self._error
        self._jobs.put(steps)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def _work(self) -> None:
        while (steps := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    for _ in steps:
                        if self._stopped:
                            return
            except BaseException as error:  # whatever it is, it belongs to the caller
                self._error = error
            del steps  # holds what the caller may need the memory of
            self._room.release()

    def __enter__(self) -> "WriteBehind":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = kind is not None and not issubclass(kind, Exception)
        interrupt: BaseException | None = None
        while True:
            try:
                self._jobs.put(None)
                self._ended.wait()  # an interrupted join would call a running thread ended
                break
            except (KeyboardInterrupt, SystemExit) as again:
                self._stopped, interrupt = True, again
        self._thread.join()
        if interrupt is not None:
            raise interrupt
        if kind is None and self._error is not None:
            raise self._error
