"""Reads what is stored already, every byte of it, before somebody counts on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cache_store.entry import EntryReader
from cache_store.errors import DamagedEntry, NotFoundError
from cache_store.reading import ReadableStore

_THREADS = 2  # a second one hides the waits of the first; more only take memory's bandwidth
_AHEAD = 4  # files open at once


@dataclass(frozen=True)
class Checked:
    """How many entries were read, and their bytes; of the damaged ones, by key, what is wrong."""

    entries: int
    nbytes: int
    damaged: dict[str, str]


def check_entries(
    store: ReadableStore, keys: Iterable[str], on_bytes: Callable[[int], None]
) -> Checked:
    """Checks the checksums of these entries; those that are not there are passed over. Nothing is
    changed. on_bytes: told the bytes read so far, in this thread."""
    entries = nbytes = 0
    damaged: dict[str, str] = {}
    under_way: deque[tuple[str, Future[int]]] = deque()

    def settle() -> None:
        nonlocal entries, nbytes
        key, future = under_way.popleft()
        entries += 1
        try:
            nbytes += future.result()
        except DamagedEntry as error:
            damaged[key] = error.message
        on_bytes(nbytes)

    with ThreadPoolExecutor(_THREADS, "check") as pool:
        for key in keys:
            try:
                reader = store.peek(key)
            except NotFoundError:
                continue
            except DamagedEntry as error:
                entries += 1
                damaged[key] = error.message
                continue
            under_way.append((key, pool.submit(_read, reader)))
            if len(under_way) >= _AHEAD:
                settle()
        while under_way:
            settle()
    return Checked(entries, nbytes, damaged)


def _read(reader: EntryReader) -> int:
    """Bytes of an entry that is sound. Raises DamagedEntry for another."""
    with reader:
        reader.verify()
        return len(reader.file)
