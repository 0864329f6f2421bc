"""Bytes of a store on disk, and room for more: counted as `du` counts, kept under the limit."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from cache_store.database import SUFFIXES, WAL_ALLOWANCE
from cache_store.disk import PARTIAL, StagedFile, is_abandoned
from cache_store.errors import IntegrityError, StoreFullError
from cache_store.index import EntryRow, Index

BLOCK = 4096
ROW_HEADROOM = 32 * BLOCK
"""What one entry's rows may add to the index and its log before they are written back."""

_SHARED_MEMORY = 32768  # a database's -shm file
_SCAN_SHARE = 20  # at most about a twentieth of the time goes into counting files anew


def round_up(size: int) -> int:
    """`size` in whole blocks."""
    return -(-size // BLOCK) * BLOCK


def walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything beneath a folder, and the folder; links are not followed. What goes away while
    we look is left out."""
    with contextlib.suppress(FileNotFoundError):
        yield root, root.lstat()
    folders = [root]
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    yield Path(item.path), status
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(Path(item.path))


def disk_usage(root: Path) -> int:
    """Bytes that `du` counts for a folder. Raises OSError."""
    return sum(status.st_blocks * 512 for _, status in walk(root))


class Space:
    """Keeps a store under its limit. Not counted from scratch at every write: the files of
    entries are known from the index, the databases and logs are looked at, and the rest (folders,
    files that nothing speaks of) is counted anew as often as that costs little."""

    def __init__(
        self, root: Path, index: Index, databases: Iterable[Path], logs: Iterable[Path] = ()
    ) -> None:
        self._root = root
        self._index = index
        self._databases = [path.with_name(path.name + s) for path in databases for s in SUFFIXES]
        self._databases += logs
        self._partial = index.path.parent / PARTIAL
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._rest = 0
        self._scanned_at = float("-inf")
        self._scan_seconds = 0.0
        self._swept = False

    # Entries that must stay.

    def hold(self, keys: Iterable[str]) -> None:
        """Entries that are not to be evicted by this process until they are let go as often."""
        with self._lock:
            self._in_use.update(keys)

    def let_go(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._in_use.subtract(keys)
            self._in_use += Counter()  # drops what is no longer held

    # Counting.

    def used(self) -> int:
        """Bytes of everything beneath the store, as `du` has it."""
        return disk_usage(self._root)

    def _counted(self, *, anew: bool = False) -> int:
        """Bytes in use as the limit sees them: a database's log counts as long as it may get."""
        started = time.monotonic()
        databases = partial = 0
        for path in self._databases:
            size = _on_disk(path)
            if path.name.endswith("-wal"):
                size = max(size, WAL_ALLOWANCE)
            elif path.name.endswith("-shm"):
                size = max(size, _SHARED_MEMORY)
            databases += size
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    partial += max(status.st_blocks * 512, round_up(status.st_size))
        stored = self._index.stored_bytes
        if anew or started - self._scanned_at > _SCAN_SHARE * self._scan_seconds:
            known = set(self._databases)
            total = sum(
                status.st_blocks * 512
                for path, status in walk(self._root)
                if path not in known and path.parent != self._partial
            )
            self._rest = total - stored
            self._scanned_at = time.monotonic()
            self._scan_seconds = self._scanned_at - started
        return databases + partial + stored + self._rest

    def overhead(self) -> int:
        """Bytes that are in use and that no eviction gives back."""
        return self._counted(anew=True) - self._index.stored_bytes

    # Making room.

    def reserve(self, key: str, size: int) -> StagedFile:
        """An empty file of `size` bytes for an entry, its space taken from the disk.

        Evicts whole entries, least recently used first. Raises StoreFullError where that isn't
        enough; then nothing has been evicted.
        """
        needed = round_up(size) + ROW_HEADROOM
        while True:
            with self._index.transaction():
                if self._fits_or_evicts(needed):
                    directory = self._index.path.parent
                    return StagedFile(directory, self._index.disk.new_name(key), size)

    def make_room(self, size: int) -> None:
        """Evicts entries until `size` more bytes fit. Raises StoreFullError."""
        while True:
            with self._index.transaction():
                if self._fits_or_evicts(round_up(size)):
                    return

    def _fits_or_evicts(self, needed: int) -> bool:
        """Within a transaction. Whether `needed` bytes fit now; else entries were evicted whose
        files go once the transaction is through, and the question is to be asked again."""
        limit = self._index.limit
        excess = self._counted() + needed - limit
        if excess <= 0:
            return True
        victims = None
        if self._swept:
            victims = self._victims(excess)
        if victims is None:  # before anything of worth goes, what killed writers left behind
            self._swept = True
            self.sweep()
            self.sweep_orphans()
            excess = self._counted(anew=True) + needed - limit
            if excess <= 0:
                return True
            victims = self._victims(excess)
        if victims is None:
            raise StoreFullError(
                f"the store at {self._root} is full: its limit is {limit} bytes and "
                f"{needed} more are needed, with nothing left to evict",
                f"set a larger limit: cacheblend store limit {limit + excess}",
            )
        for victim in victims:
            self.remove(victim)
        return False

    def _victims(self, excess: int) -> list[EntryRow] | None:
        """Entries, least recently used first, whose files make up `excess` bytes; or None."""
        self._index.flush()
        victims: list[EntryRow] = []
        with self._lock:
            held = set(self._in_use)
        for row in self._index.entries(by_use=True):
            if isinstance(row, EntryRow) and row.key not in held:
                victims.append(row)
                excess -= row.size
                if excess <= 0:
                    return victims
        return None

    def remove(self, row: EntryRow) -> None:
        """Takes an entry out of the index, within a transaction; its file goes after it."""
        self._index.delete(row.key)
        try:
            group = self._index.group(row.group)
        except IntegrityError:  # put right by verify; it can't lead to this entry any more
            return
        if group is not None:
            self._index.set_group(row.group, group.without(row.key))

    def sweep(self) -> int:
        """Removes what dead writers left half-written, within a transaction. Returns how many."""
        swept = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as items:
            for item in items:
                path = Path(item.path)
                if is_abandoned(path):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        swept += 1
        return swept

    def sweep_orphans(self) -> int:
        """Removes finished chunk files no entry names, within a transaction: a writer puts a file
        in place in the transaction that names it, so there is none in between."""
        names = self._index.names()
        swept = 0
        with os.scandir(self._index.path.parent) as items:
            for item in items:
                if item.name.endswith(".kv") and item.name not in names:
                    with contextlib.suppress(OSError):
                        Path(item.path).unlink()
                        swept += 1
        return swept


def _on_disk(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0
