"""Worker processes, one a device, that share tasks.

What a worker does comes from the function that starts it, so nothing here knows of models. Tasks
and results are the program's own objects and cross over on a pipe that only the two of them have.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

from cache_store.errors import (
    CacheblendError,
    IntegrityError,
    NotFoundError,
    StoreFullError,
    UsageError,
)

Task = TypeVar("Task")
Result = TypeVar("Result")

# Called in the worker with its device; what it enters answers one task a call, and never raises
# for what can be wrong with a task. Must be importable by name, as `spawn` needs it.
Start = Callable[[str], AbstractContextManager[Callable[[Task], Result]]]

ATTEMPTS = 2  # at a task that workers die of
CLOSING_SECONDS = 10.0  # that idle workers get to close what they have open


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of the task with this ticket."""

    ticket: int
    result: Result


@dataclass(frozen=True)
class Lost:
    """The task with this ticket, of which workers died; `reason` says how."""

    ticket: int
    reason: str


@dataclass(frozen=True)
class _Refused:
    """A worker's message that it cannot start: an error of `cache_store.errors`, taken apart."""

    kind: str
    message: str
    hint: str

    def error(self) -> CacheblendError:
        kinds = (UsageError, NotFoundError, IntegrityError, StoreFullError)
        found = next((kind for kind in kinds if kind.kind == self.kind), CacheblendError)
        return found(self.message, self.hint)


@dataclass
class _Pending(Generic[Task]):
    """A task nobody has now. avoid: the slot whose worker died of it."""

    ticket: int
    task: Task
    died: int = 0
    avoid: int | None = None


@dataclass
class _Slot(Generic[Task]):
    """A device's place: its worker, if it has one now, and the task that one is at.

    ready: the worker has started; proven: one has before; broken: there will be no other. since:
    when it was given its task, by the monotonic clock.
    """

    index: int
    device: str
    process: SpawnProcess | None = None
    pipe: connection.Connection[Any, Any] | None = None
    task: _Pending[Task] | None = None
    ready: bool = False
    proven: bool = False
    broken: bool = False
    since: float = 0.0


class WorkerPool(Generic[Task, Result]):
    """Workers on `devices`, started with the first task. A context manager, for one thread.

    A task whose worker dies goes to another one; if that dies too, the task is lost and the pool
    goes on with new workers. attempts: after how many deaths. patience: seconds that a task may
    take; a worker that takes longer is killed and its task lost. say: told what the user should
    know.
    """

    def __init__(
        self,
        devices: Sequence[str],
        start: Start[Task, Result],
        say: Callable[[str], None] = lambda text: None,
        *,
        attempts: int = ATTEMPTS,
        patience: Callable[[Task], float] | None = None,
    ) -> None:
        self._attempts, self._patience = attempts, patience
        self._slots = [_Slot[Task](index, device) for index, device in enumerate(devices)]
        self._start_function = start
        self._say = say
        self._pending: deque[_Pending[Task]] = deque()

    def submit(self, ticket: int, task: Task) -> None:
        """Adds a task; `wait` gives it to a worker and tells what became of it."""
        self._pending.append(_Pending(ticket, task))

    def wait(
        self, also: int | None = None, *, timeout: float | None = None
    ) -> tuple[list[Done[Result] | Lost], bool]:
        """Waits until a task is done or lost, or the file descriptor `also` can be read, at most
        `timeout` seconds.

        Returns the former and whether it was the latter; at once where there is nothing to wait
        for. Raises the error of a worker that cannot start on its device, CacheblendError where
        no worker is left.
        """
        finished: list[Done[Result] | Lost] = []
        readable = False
        while not finished and not readable:
            self._hand_out()
            if also is None and not self._unfinished():
                break
            watched: list[Any] = [] if also is None else [also]
            for slot in self._slots:
                if slot.process is not None:
                    watched += [slot.pipe, slot.process.sentinel]
            heard = connection.wait(watched, _least(timeout, self._until_late()))
            for slot in self._slots:
                if slot.process is not None:
                    if slot.pipe in heard:
                        finished += self._hear(slot)
                    elif slot.process.sentinel in heard:
                        finished += self._died(slot)
            finished += self._late()
            readable = also is not None and also in heard
            if timeout is not None and not heard:
                break
        self._hand_out()
        return finished, readable

    def close(self, *, now: bool = False) -> None:
        """Ends the workers; `now`: in the middle of what they do."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        for slot in self._slots:
            if slot.pipe is not None:
                slot.pipe.close()  # to an idle worker the end
            if slot.process is not None and (now or slot.task is not None or not slot.ready):
                slot.process.terminate()
            slot.process = slot.pipe = None
        for process in processes:
            process.join(CLOSING_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(now=kind is not None)

    def _unfinished(self) -> bool:
        return bool(self._pending) or any(slot.task is not None for slot in self._slots)

    def _hand_out(self) -> None:
        """Gives waiting tasks to idle workers, and starts those that are missing."""
        alone = sum(not slot.broken for slot in self._slots) == 1
        for slot in self._slots:
            if self._pending and slot.process is None and not slot.broken:
                self._start(slot)
            if not slot.ready or slot.task is not None or slot.pipe is None:
                continue
            fit = [p for p in self._pending if alone or p.avoid != slot.index]
            if not fit:
                continue
            slot.task, slot.since = fit[0], time.monotonic()
            self._pending.remove(fit[0])
            with suppress(OSError):  # it died meanwhile: the next wait hears of it
                slot.pipe.send(fit[0].task)

    def _start(self, slot: _Slot[Task]) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, self._start_function, slot.device), daemon=True
        )
        slot.ready, slot.task = False, None
        with _interrupts_held():
            process.start()
            slot.process, slot.pipe = process, ours
        theirs.close()

    def _hear(self, slot: _Slot[Task]) -> list[Done[Result] | Lost]:
        """Takes a worker's message."""
        if slot.pipe is None:
            return []
        try:
            message = slot.pipe.recv()
        except (EOFError, OSError):
            return self._died(slot)
        if isinstance(message, _Refused):
            return self._failed_to_start(slot, message.error())
        if slot.task is None:  # its first message
            slot.ready = slot.proven = True
            return []
        ticket, slot.task = slot.task.ticket, None
        return [Done(ticket, message)]

    def _died(self, slot: _Slot[Task]) -> list[Done[Result] | Lost]:
        how = _end_of(slot)
        if not slot.ready:
            error = CacheblendError(
                f"the worker on {slot.device} {how} before it was ready", _advice(how)
            )
            return self._failed_to_start(slot, error)
        task, slot.task, slot.ready = slot.task, None, False
        if task is None:
            return []
        task.died += 1
        if task.died >= self._attempts:
            several = f"{task.died} workers died of it, the last one"
            return [Lost(task.ticket, f"{several if task.died > 1 else 'its worker'} {how}")]
        task.avoid = slot.index
        self._pending.appendleft(task)
        return []

    def _until_late(self) -> float | None:
        """Seconds until the first task has taken too long."""
        if self._patience is None:
            return None
        ends = [s.since + self._patience(s.task.task) for s in self._slots if s.task is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _late(self) -> list[Done[Result] | Lost]:
        """Ends the workers whose tasks have taken too long."""
        lost: list[Done[Result] | Lost] = []
        for slot in self._slots:
            if self._patience is None or slot.task is None or slot.process is None:
                continue
            patience = self._patience(slot.task.task)
            if time.monotonic() - slot.since >= patience:
                slot.process.kill()
                _end_of(slot)
                lost.append(Lost(slot.task.ticket, f"it took longer than {patience:.0f} s"))
                slot.task, slot.ready = None, False
        return lost

    def _failed_to_start(
        self, slot: _Slot[Task], error: CacheblendError
    ) -> list[Done[Result] | Lost]:
        _end_of(slot)
        slot.broken = True
        if not slot.proven or all(slot.broken for slot in self._slots):
            raise error
        self._say(f"going on without {slot.device}: {error.message}")
        return []


def _least(*seconds: float | None) -> float | None:
    known = [one for one in seconds if one is not None]
    return min(known) if known else None


def _serve(pipe: connection.Connection[Any, Any], start: Start[Any, Any], device: str) -> None:
    """A worker's whole life: a message once it has started, then one for each task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    signal.signal(signal.SIGTERM, _leave)
    with ExitStack() as stack, suppress(BrokenPipeError):  # where the parent is gone
        # While Python ends there is nothing left to leave, and it would tell of the attempt.
        stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        try:
            answer = stack.enter_context(start(device))
        except CacheblendError as error:
            pipe.send(_Refused(error.kind, error.message, error.hint))
            return
        pipe.send(None)
        while True:
            try:
                task = pipe.recv()
            except EOFError:
                return
            pipe.send(answer(task))


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends a worker in the middle of its task, but in good order: what is open gets closed."""
    sys.exit(128 + number)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Within, SIGINT waits; a process started here never gets it, not while it is starting either.

    At a terminal Ctrl-C reaches the whole group, and would end workers with a traceback each.
    """
    resource_tracker.ensure_running()  # it would let SIGINT through when it is started below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_of(slot: _Slot[Any]) -> str:
    """Empties a slot whose worker is gone or going; how it ended, as "was killed by SIGKILL"."""
    process, pipe = slot.process, slot.pipe
    slot.process = slot.pipe = None
    if pipe is not None:
        pipe.close()
    if process is None:
        return "is gone"
    process.join(CLOSING_SECONDS)
    if process.is_alive():  # it closed its pipe and went on
        process.kill()
        process.join()
    code = process.exitcode or 0
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _advice(how: str) -> str:
    if how.endswith("SIGKILL"):
        return "the system may have run out of memory: use fewer devices, or a smaller model"
    return "what it wrote above says why"
