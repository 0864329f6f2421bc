"""The index's database: opening it, asking it, and transactions that files are part of."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from diskcache.core import DBNAME, Timeout

from cache_store.database import (
    BUSY_SECONDS,
    connect_read_only,
    damaged,
    guarded,
    inode,
    patiently,
    prepare_file,
)
from cache_store.disk import PARTIAL, ChunkDisk
from cache_store.errors import IntegrityError, StoreBusy, no_store
from cache_store.index_file import look_at, new_cache, require_unlocked
from cache_store.locks import close_lock, folder_lock

COLUMNS = "key, raw, tag, size, mode, filename, store_time, access_time, access_count"


class IndexDatabase:
    """What `cache_store.index.Index` asks and writes through; see there."""

    is_stand_in = False

    def __init__(
        self,
        directory: Path,
        *,
        read_only: bool,
        size_limit: int | None = None,
        patience: float = BUSY_SECONDS,
    ) -> None:
        """size_limit: of a new index, in bytes; one that is there already keeps its own.
        patience: how long reading, and opening for writing, wait for others, in seconds."""
        self.path, self._folder = directory / DBNAME, f"{directory}{os.sep}"
        self._patience = patience
        self._lock = threading.RLock()
        self._seen = threading.local()  # which file this thread's connection is of
        self._busy: tuple[float, StoreBusy] | None = None
        self._reader: sqlite3.Connection | None = None
        with guarded(self.path):
            # An empty file is what a crash leaves of a database that was about to be made.
            there = os.path.lexists(self.path) and self.path.lstat().st_size > 0
            limit = look_at(self.path, patience) if there else None
            if limit is None:
                limit = size_limit
            if read_only:
                if limit is None:
                    if any(directory.glob("*.kv")):
                        raise damaged(self.path, "it is empty" if there else "it is gone")
                    # Who made it was killed before there was anything; the next writer goes on.
                    raise no_store(directory.parent)
                self._reader = connect_read_only(self.path, patience)
                self.disk = ChunkDisk(str(directory))
                self._limit = limit or 0
                return
            prepare_file(self.path)
            require_unlocked(self.path, patience)  # diskcache would wait for a minute
            self._cache = patiently(lambda: new_cache(directory, limit or 0, patience), patience)
            self.disk = self._cache.disk

    @classmethod
    def stand_in(cls, directory: Path) -> Self:
        """An index without entries, in the place of one that can't be used; for reading only."""
        index = cls.__new__(cls)
        index.is_stand_in = True
        index.path, index.disk = directory / DBNAME, ChunkDisk(str(directory))
        index._folder = f"{directory}{os.sep}"
        index._lock, index._limit = threading.RLock(), 0
        index._reader = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        index._reader.execute(f"CREATE TABLE Cache ({COLUMNS}, value)")
        index._reader.execute("CREATE TABLE Settings (key, value)")
        return index

    def _ask(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            if self._reader is not None:
                with self._lock:
                    return self._reader.execute(sql, values).fetchall()
            if self._busy is not None and time.monotonic() < self._busy[0]:
                raise self._busy[1]  # one wait for many questions
            self._follow()
            return self._cache._sql(sql, values).fetchall()  # type: ignore[no-any-return]
        except (sqlite3.Error, UnicodeDecodeError, Timeout, OSError) as error:
            try:
                with guarded(self.path):
                    raise error
            except StoreBusy as busy:
                self._busy = time.monotonic() + self._patience, busy
                raise

    def _follow(self) -> None:
        """To the new file, where the index was made anew since this thread used it."""
        now, seen = inode(self.path), getattr(self._seen, "inode", None)
        if now != seen and not self._in_transaction():
            if seen is not None:
                self._cache.close()  # this thread's connection; the next use opens another
            self._seen.inode = now

    def _in_transaction(self) -> bool:
        connection = getattr(self._cache._local, "con", None)
        return connection is not None and connection.in_transaction

    def check(self) -> str:
        """What SQLite finds wrong with the file; empty if nothing."""
        try:
            found = self._ask("PRAGMA integrity_check(1)")
        except IntegrityError as error:
            return error.message
        return "" if found == [("ok",)] else f"{self.path.name}: {found[0][0]}"

    @contextlib.contextmanager
    def transaction(self, *, patience: float = BUSY_SECONDS) -> Iterator[None]:
        """All that is written within happens or none of it, files included; others wait.
        patience: how many seconds to wait for them. Within another it is part of that one."""
        if self._in_transaction():
            yield
            return
        folder = self.path.parent.parent
        with guarded(self.path), folder_lock(folder, alone=False, patience=patience):
            self._follow()
            self.disk.defer()
            committed = False
            try:
                with self._waiting(patience), self._cache.transact():
                    yield
                committed = True
            finally:
                if not committed and self._in_transaction():  # the commit failed
                    self._cache._con.rollback()
                self.disk.settle(committed, self._is_named)

    @contextlib.contextmanager
    def _waiting(self, seconds: float) -> Iterator[None]:
        """Within, this thread's connection waits that long for other processes."""
        self._cache._con.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._cache._con.execute(f"PRAGMA busy_timeout = {int(self._patience * 1000)}")

    def _is_named(self, filename: str) -> bool:
        return bool(self._ask("SELECT 1 FROM Cache WHERE filename = ?", (filename,)))

    def has_chunks(self) -> bool:
        """Whether there are entries of chunks whose texts a catalog should have."""
        sql = "SELECT 1 FROM Cache WHERE filename IS NULL AND tag IS NOT NULL LIMIT 1"
        return bool(self._ask(sql))

    @property
    def limit(self) -> int:
        """The size limit in bytes, as any process set it last."""
        rows = self._ask("SELECT value FROM Settings WHERE key = 'size_limit'")
        return int(rows[0][0]) if rows else self._limit

    def set_limit(self, limit: int) -> None:
        """Sets the size limit, in bytes, for every process."""
        with self.transaction():
            self._cache.reset("size_limit", limit)

    def close(self) -> None:
        """Closes this thread's connection."""
        if self._reader is not None:
            self._reader.close()
            return
        with close_lock(self.path.parent.parent), guarded(self.path):
            self._cache.close()

    @staticmethod
    def prepare(directory: Path) -> None:
        """Makes an index's folders, for their owner alone. Raises OSError."""
        for folder in (directory, directory / PARTIAL):
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                with contextlib.suppress(PermissionError):  # somebody else's, shared on purpose
                    folder.chmod(0o700)
