"""Files to documents with several processes: those that are converted go to readers, all others
are read here, for handing over their text would take longer than reading it.

A reader also keeps what a damaged file does to it from everybody else: one that dies or takes for
ever costs the file it was at.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import BinaryIO

from engine.documents.document import Document, Found, FoundFile, Skipped, Unreadable
from engine.documents.kinds import CONVERTED_KINDS, kind_by_name
from engine.documents.reading import read_document, read_light
from engine.workers import Lost, WorkerPool

MOST_READERS = 8
AHEAD = 3  # files a reader that are given out before the first of them is wanted
LOOK_AHEAD = 1000  # files that are looked at for such that are to be converted

# A book of a thousand pages takes a minute; what takes longer than this is stuck.
PATIENCE = 120.0  # seconds
PATIENCE_PER_MB = 10.0

# A file of a few kilobytes can be made to unpack to all the memory there is.
MOST_MEMORY = 4 * 2**30  # bytes a reader

Read = Document | Unreadable | Skipped


def usual_readers() -> int:
    """As many as there are cores for this process, at most `MOST_READERS`."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return min(cores, MOST_READERS)


def read_in_parallel(
    found: Iterable[Found], readers: int | None = None, *, stdin: BinaryIO | None = None
) -> Iterator[Read]:
    """As `read_documents`, in the same order, with so many reader processes; they are started with
    the first file that is to be converted."""
    names = [f"reader {number}" for number in range(1, (readers or usual_readers()) + 1)]
    pool = WorkerPool[FoundFile, Read](names, reader, attempts=1, patience=_patience)
    with pool:
        yield from _InOrder(pool, AHEAD * len(names), stdin).read(iter(found))


@contextmanager
def reader(name: str) -> Iterator[_Reader]:
    """What a reader process does; see `engine.workers`."""
    _limit_memory()
    yield _Reader()


def _limit_memory() -> None:
    """So that a file made to do harm costs its reader, and no other program of the machine."""
    if sys.platform == "win32":
        return
    import resource

    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
    with suppress(OSError, ValueError):  # what isn't limited so on some systems
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


class _Reader:
    def __call__(self, file: FoundFile) -> Read:
        return read_document(file)


class _InOrder:
    """The documents of a walk in its order. most: files that are at readers at a time."""

    def __init__(
        self, pool: WorkerPool[FoundFile, Read], most: int, stdin: BinaryIO | None
    ) -> None:
        self._pool, self._most, self._stdin = pool, most, stdin
        self._tickets = count()
        self._files: dict[int, FoundFile] = {}  # that readers have
        self._done: dict[int, Read] = {}

    def read(self, found: Iterator[Found]) -> Iterator[Read]:
        ahead: deque[tuple[Found, int | None]] = deque()
        while True:
            while len(ahead) < LOOK_AHEAD and len(self._files) + len(self._done) < self._most:
                item = next(found, None)
                if item is None:
                    break
                ahead.append((item, self._give(item) if _is_converted(item) else None))
            if not ahead:
                return
            if self._files:
                self._hear(timeout=0)
            item, ticket = ahead.popleft()
            yield self._result(item, ticket)

    def _give(self, item: Found) -> int:
        assert isinstance(item, FoundFile)
        ticket = next(self._tickets)
        self._files[ticket] = item
        self._pool.submit(ticket, item)
        return ticket

    def _result(self, item: Found, ticket: int | None) -> Read:
        if not isinstance(item, FoundFile):
            return item
        if item.path is None:
            return read_document(item, stdin=self._stdin)
        if ticket is None:
            read = read_light(item)
            if read is not None:
                return read
            ticket = self._give(item)  # its name says something else
        while ticket not in self._done:
            self._hear(timeout=None)
        return self._done.pop(ticket)

    def _hear(self, timeout: float | None) -> None:
        for finished in self._pool.wait(timeout=timeout)[0]:
            file = self._files.pop(finished.ticket)
            if isinstance(finished, Lost):
                what = f"could not be read, it may be damaged ({finished.reason})"
                self._done[finished.ticket] = Unreadable(file.source, what)
            else:
                self._done[finished.ticket] = finished.result


def _is_converted(item: Found) -> bool:
    """Whether a file is one for a reader, by its name."""
    if not isinstance(item, FoundFile) or item.path is None:
        return False
    return kind_by_name(item.source) in CONVERTED_KINDS


def _patience(file: FoundFile) -> float:
    try:
        size = file.path.stat().st_size if file.path is not None else 0
    except OSError:
        size = 0
    return PATIENCE + PATIENCE_PER_MB * size / 1e6
