"""Bytes of a store on disk, and room for more: counted as `du` counts, kept under the limit."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from cache_store.catalog import Catalog
from cache_store.database import SUFFIXES, WAL_ALLOWANCE
from cache_store.disk import PARTIAL, REBUILDING, StagedFile, is_abandoned, lock_unused
from cache_store.errors import CacheblendError, IntegrityError, StoreFullError
from cache_store.eviction import Eviction, Victim, freed
from cache_store.index import EntryRow, Index
from cache_store.lease import LEASES, Lease, Leases

BLOCK = 4096
ROW_HEADROOM = 32 * BLOCK
"""What one entry's rows may add to the index and its log before they are written back."""

MARGIN = 64 * BLOCK
"""What small changes may add that reserve nothing: notes of uses, counters, rows that go. A log
grows by them, too, as long as somebody reads and it can't be written back."""

CLAIM = ".claim"
"""Ending of files in `partial` that take nothing: bytes that are spoken for."""

_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 32  # entries evicted in one transaction
_Made = TypeVar("_Made")
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
    entries are known from the index, the databases, folders and logs are looked at, and the rest
    (files that nothing speaks of) is counted anew as often as that costs little.

    What is about to be written is reserved in a transaction of the index, as a file in the folder
    `partial` that others count: with its space taken from the disk, or, for what goes elsewhere, as
    a claim of that length. What is about to be removed is counted so until it is gone.
    """

    def __init__(
        self, root: Path, index: Index, databases: Iterable[Path], logs: Iterable[Path] = ()
    ) -> None:
        self._root = root
        self._index = index
        self._databases = [path.with_name(path.name + s) for path in databases for s in SUFFIXES]
        self._logs = list(logs)
        kv = index.path.parent
        self._partial = kv / PARTIAL
        self._folders = [root, kv, self._partial, kv / LEASES]
        self._folders += sorted({path.parent for path in self._logs} - set(self._folders))
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._rest = 0
        self._scanned_at = float("-inf")
        self._scan_seconds = 0.0
        self._swept = False
        self._on_evicted: Callable[[int, int], None] = lambda entries, size: None
        self._catalog: Catalog | None = None
        self.lease = Lease(kv / LEASES, self.claim)
        self.leases = Leases(kv / LEASES, self.lease)
        self.eviction = Eviction(index, self._held, self.leases.listed)

    def use(self, catalog: Catalog, on_evicted: Callable[[int, int], None]) -> None:
        """Where policy and pins are; and whom to tell of evictions: how many, how many bytes."""
        self._catalog, self._on_evicted = catalog, on_evicted
        self.eviction.use_catalog(catalog)

    # Entries that must stay.

    def hold(self, keys: Iterable[str]) -> None:
        """Entries that are not to be evicted by this process until they are let go as often."""
        with self._lock:
            self._in_use.update(keys)

    def let_go(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                if self._in_use[key] > 1:
                    self._in_use[key] -= 1
                else:
                    del self._in_use[key]

    def _held(self) -> set[str]:
        with self._lock:
            return set(self._in_use)

    def kept_bytes(self, keep: Iterable[str]) -> int:
        """Bytes of the entries that can't be evicted: those to `keep`, pinned ones, others'."""
        if self.eviction.policy == "none":
            return self._index.stored_bytes
        keys, pinned = {*keep, *self.leases.listed()}, self.eviction.pinned_groups()
        if not keys and not pinned:
            return 0
        sizes = self._index.sizes()
        return sum(size for key, group, size in sizes if key in keys or group in pinned)

    # Counting.

    def used(self) -> int:
        """Bytes of everything beneath the store, as `du` has it."""
        return disk_usage(self._root)

    def _counted(self, *, anew: bool = False) -> int:
        """Bytes in use as the limit sees them: a database's log counts as long as it may get, and
        whoever is writing an entry will add its rows."""
        started = time.monotonic()
        seen = MARGIN + self._database_bytes()
        seen += sum(map(_on_disk, (*self._folders, *self._logs, *self.leases.files())))
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    seen += max(status.st_blocks * 512, round_up(status.st_size))
                    seen += 0 if item.name.endswith(CLAIM) else ROW_HEADROOM
        stored = self._index.stored_bytes
        if anew or started - self._scanned_at > _SCAN_SHARE * self._scan_seconds:
            self._rest = self._unknown_bytes()
            self._scanned_at = time.monotonic()
            self._scan_seconds = self._scanned_at - started
        return seen + stored + self._rest

    def _unknown_bytes(self) -> int:
        """Bytes of what the index doesn't speak of. Not all bytes less the index's: it may speak of
        files that are gone, which are put back without being counted again."""
        known = set(map(str, (*self._databases, *self._folders, *self._logs)))
        counted, kv = set(map(str, self._folders[2:4])), str(self._index.path.parent)
        sizes, total = self._index.file_sizes(), 0
        folders = [str(self._root)]
        while folders:  # as `walk`, without a `Path` for each of what may be very many
            folder = folders.pop()
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as items:
                for item in items:
                    try:
                        status = item.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(item.path)
                    if item.path not in known and folder not in counted:
                        said = sizes.get(item.name, 0) if folder == kv else 0
                        total += max(0, status.st_blocks * 512 - said)
        return total

    def _database_bytes(self) -> int:
        total = 0
        for path in self._databases:
            size = _on_disk(path)
            if path.name.endswith("-wal"):
                size = max(size, WAL_ALLOWANCE)
            elif path.name.endswith("-shm"):
                size = max(size, _SHARED_MEMORY)
            elif path == self._index.path:
                size = max(size, self._index.file_bytes)
            elif self._catalog is not None and path == self._catalog.path:
                with contextlib.suppress(CacheblendError):
                    size = max(size, self._catalog.file_bytes)
            total += size
        return total

    def overhead(self) -> int:
        """Bytes that are in use and that no eviction gives back."""
        return self._counted(anew=True) - self._index.stored_bytes

    # Making room.

    def reserve(self, key: str, size: int, rows: int = 0, *, saved: bool = False) -> StagedFile:
        """An empty file of `size` bytes for an entry, its space taken from the disk.

        rows: bytes of what goes into the index besides an entry's usual rows. Evicts whole entries,
        in the policy's order; saved: for an entry that a prompt saved, which pushes out others of
        its kind only. Raises StoreFullError where that isn't enough; then nothing has been evicted.
        """
        directory, name = self._index.path.parent, self._index.disk.new_name(key)
        needed = round_up(size) + ROW_HEADROOM + round_up(rows)
        return self._make_room(needed, lambda: StagedFile(directory, name, size), saved=saved)

    @contextlib.contextmanager
    def claim(self, size: int) -> Iterator[None]:
        """Within, `size` more bytes may be written anywhere in the store. Raises StoreFullError."""
        claim = self._make_room(round_up(size), lambda: self._claim(size))
        try:
            yield
        finally:
            claim.close()

    def make_room(self, size: int, limit: int | None = None) -> None:
        """Evicts entries until `size` more bytes fit under the limit, or another. Raises
        StoreFullError."""
        self._make_room(round_up(size), lambda: None, limit=limit)

    def _claim(self, size: int) -> StagedFile:
        name = secrets.token_hex(8) + CLAIM
        return StagedFile(self._index.path.parent, name, size, claim=True)

    def _make_room(
        self,
        needed: int,
        then: Callable[[], _Made],
        *,
        saved: bool = False,
        limit: int | None = None,
    ) -> _Made:
        """What `then` makes, once `needed` bytes fit and in the same transaction."""
        evicted = False
        while True:
            self._index.flush()
            with contextlib.ExitStack() as parting, self._index.transaction():
                excess = self._excess(needed, limit)
                for _ in range(2):
                    if excess <= 0:
                        return then()
                    if self._swept and self._evict(excess, needed, saved, evicted, parting):
                        evicted = True
                        break
                    # Before anything of worth goes, what killed processes left behind. Chunk files
                    # that no entry names were counted, so they are looked for where any may be.
                    again, self._swept = self._swept, True
                    if self.sweep(orphans=again or self._rest >= BLOCK) or again:
                        excess = self._excess(needed, limit, anew=True)
                else:
                    if excess <= 0:
                        return then()
                    if not self._evict(excess, needed, saved, evicted, parting):
                        raise self._full(needed, excess, saved)
                    evicted = True

    def _excess(self, needed: int, limit: int | None, *, anew: bool = False) -> int:
        least = min(self._index.limit, self._index.limit if limit is None else limit)
        return self._counted(anew=anew) + needed - least

    def _evict(
        self, excess: int, needed: int, saved: bool, begun: bool, parting: contextlib.ExitStack
    ) -> bool:
        """Takes entries out of the index, if not all that have to go; their files go once the
        transaction is through. False, and nothing is changed, where too few can go.

        begun: others went before them, so it isn't asked again whether there are enough.
        """
        # What their rows change is in the log before their files are gone.
        most = min(max((needed - excess) // (2 * ROW_HEADROOM), _LEAST_AT_ONCE), _MOST_AT_ONCE)
        victims = self.eviction.victims(excess, most, saved_only=saved)
        for victim in victims:
            parting.callback(victim.release)
        short = freed(victims) < excess and not begun
        if not victims or (short and not self.eviction.suffices(excess, saved_only=saved)):
            return False
        parting.enter_context(self.parting(freed(victims)))
        for victim in victims:
            self.remove(victim.row)
        self._on_evicted(len(victims), freed(victims))
        return True

    @contextlib.contextmanager
    def parting(self, size: int) -> Iterator[None]:
        """Around a transaction's end, or begun within it: files of so many bytes, which it takes
        out of the index, count until they are gone."""
        claim = self._claim(size) if size else None
        try:
            yield
        finally:
            if claim is not None:
                claim.close()

    def _full(self, needed: int, excess: int, saved: bool) -> StoreFullError:
        limit = self._index.limit
        why = "with nothing left to evict"
        if self.eviction.policy == "none":
            why = "and it evicts nothing"
        elif saved:
            why = "and what one prompt saves pushes out nothing that was ingested"
        return StoreFullError(
            f"the store at {self._root} is full: its limit is {limit} bytes and "
            f"{needed} more are needed, {why}",
            f"set a larger limit: cacheblend store limit {limit + excess}",
        )

    def discard(self, row: EntryRow, stack: contextlib.ExitStack) -> bool:
        """Takes an entry out of the index, within a transaction, unless somebody uses it; whether
        it did. stack: to be left once the transaction is through."""
        if row.key in self.leases:
            return False
        lock = lock_unused(row.path)
        if lock is None:
            return False
        stack.callback(Victim(row, lock).release)
        stack.enter_context(self.parting(row.size))
        self.remove(row)
        return True

    def remove(self, row: EntryRow) -> None:
        """Takes an entry out of the index, within a transaction; its file goes after it."""
        self._index.delete(row.key)
        try:
            group = self._index.group(row.group)
        except IntegrityError:  # put right by verify; it can't lead to this entry any more
            return
        if group is not None:
            self._index.set_group(row.group, group.without(row.key))

    def sweep(self, *, orphans: bool = True) -> int:
        """Removes what dead processes left behind, within a transaction: half-written files,
        claims, lists of entries in use and, orphans, finished files that no entry names. Returns
        how many."""
        self.sweep_rebuilding()
        swept = self._sweep_partial("") + self.leases.sweep()
        return swept + (self.sweep_orphans() if orphans else 0)

    def sweep_traces(self) -> None:
        """Removes of it what holds no data: claims and lists. Within a transaction."""
        self._sweep_partial(CLAIM)
        self.leases.sweep()

    def _sweep_partial(self, ending: str) -> int:
        swept = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._partial) as items:
            for item in items:
                path = Path(item.path)
                if path.name.endswith(ending) and is_abandoned(path):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        swept += 1
        return swept

    def sweep_rebuilding(self) -> None:
        """Removes a new index that was never finished, within a transaction: who makes one is
        alone in the store."""
        place = self._partial / REBUILDING
        if not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)

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
