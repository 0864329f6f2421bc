"""The catalog's database: opening it, asking it, transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from cache_store.database import (
    BUSY_SECONDS,
    CHECKPOINT_PAGES,
    WAL_ALLOWANCE,
    check_files,
    connect_read_only,
    damaged,
    guarded,
    inode,
    is_writable,
    patiently,
    prepare_file,
)
from cache_store.errors import CacheblendError, IntegrityError
from cache_store.locks import close_lock, folder_lock
from cache_store.schema import NEWEST, VERSION, bring_up, decoded, strange_object, version_of

CATALOG_NAME = "catalog.db"
SET_ASIDE = "catalog.damaged.db"
"""What a damaged catalog is called once a new one is in its place."""

_LEAST_BYTES = 512
Claim = Callable[[int], AbstractContextManager[None]]
"""Within one, so many more bytes may be written to the store."""


class CatalogDatabase:
    """What `cache_store.catalog.Catalog` asks and writes through; see there."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool,
        claim: Claim | None = None,
        patience: float = BUSY_SECONDS,
    ) -> None:
        """claim: text is written within one of that many bytes; may raise. patience: how long
        reading waits for others, in seconds."""
        self.path = path
        self._claim = claim or (lambda size: contextlib.nullcontext())
        self._lock = threading.RLock()
        self._read_only, self._patience = read_only, patience
        self._fault: CacheblendError | None = None
        self._file: tuple[int, int] | None = None
        self._open()

    @classmethod
    def stand_in(cls, path: Path, fault: CacheblendError) -> Self:
        """In the place of a catalog that can't be used: whatever is asked of it raises `fault`."""
        catalog = cls.__new__(cls)
        catalog.path, catalog._fault = path, fault
        catalog._lock, catalog._read_only, catalog._file = threading.RLock(), True, None
        catalog._db = _connect(":memory:", 0)
        return catalog

    def _open(self) -> None:
        path, read_only = self.path, self._read_only
        with guarded(path):
            if path.exists() and 0 < path.stat().st_size < _LEAST_BYTES:
                raise damaged(path, "it is cut short")  # to SQLite it would be an empty one
            if read_only:
                check_files(path)
                self._db = _connect_read_only(path, self._patience)
            else:
                prepare_file(path)
                self._db = _connect(path, self._patience)
                self._file = inode(path) if path.exists() else None
            try:
                self._set_up(read_only)
            except BaseException:
                self._db.close()
                raise

    def _follow(self) -> None:
        """To the new file, where the catalog was made anew since it was opened."""
        if self._fault is not None:
            raise self._fault
        if self._file is None or self._db.in_transaction:
            return
        # Where it was set aside, and nobody has begun the new one, this does.
        if not self.path.exists() or self._file != inode(self.path):
            self._db.close()
            self._open()

    def _set_up(self, read_only: bool) -> None:
        if not read_only:
            patiently(lambda: self._db.execute("PRAGMA journal_mode = wal"), self._patience)
        self._db.execute("PRAGMA synchronous = normal")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_ALLOWANCE}")
        # Names of files may hold what isn't UTF-8; it comes back as it was given.
        self._db.text_factory = decoded
        self._prepare(read_only)

    def _prepare(self, read_only: bool) -> None:
        version = version_of(self._db)
        if version is not None and version < VERSION and not read_only:
            with self.writing(count=False):
                version = version_of(self._db)  # another process may have been at it
                if version is not None and version < VERSION:
                    bring_up(self._db, version)
                    version = VERSION
        if version == 0 and read_only:  # one that was never written
            bring_up(self._db, 0)
        elif version is None or version > NEWEST:
            raise damaged(self.path, "it is not a catalog of ours")
        elif version != VERSION:
            older = version < VERSION
            raise IntegrityError(
                f"{self.path} has catalog version {version}, this is {VERSION}",
                "make its folder writable and use it once"
                if older
                else "use the cacheblend that made it, or another store",
            )
        if strange := strange_object(self._db):
            raise damaged(self.path, f"it is not a catalog of ours, it holds {strange!r}")

    @contextlib.contextmanager
    def writing(
        self, *, count: bool = True, patience: float = BUSY_SECONDS
    ) -> Iterator[sqlite3.Connection]:
        """A transaction: all that is written within happens or none of it. count: as a change of
        documents or models, which `revision` tells of. patience: how many seconds to wait for
        others."""
        with self._lock, guarded(self.path):
            if self._fault is not None:
                raise self._fault
            with folder_lock(self.path.parent, alone=False, patience=patience):
                self._follow()
                db = self._db
                try:
                    db.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
                    db.execute("BEGIN IMMEDIATE")
                    yield db
                    if count:
                        db.execute("UPDATE revision SET value = value + 1")
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.rollback()
                    db.execute(f"PRAGMA busy_timeout = {int(self._patience * 1000)}")

    def ask(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that answer a query."""
        with self._lock, guarded(self.path):
            self._follow()
            return self._db.execute(sql, values).fetchall()

    @property
    def revision(self) -> int:
        """A number that changes with every write."""
        return int(self.ask("SELECT value FROM revision")[0][0])

    @contextlib.contextmanager
    def growing(self, size: int) -> Iterator[None]:
        """Around a large transaction, which writes so many bytes, log included: their room is
        claimed, and the log is written back and cut. Raises StoreFullError."""
        with self._claim(size + 2**16), self._shortened():
            yield

    @contextlib.contextmanager
    def _shortened(self) -> Iterator[None]:
        """Around a large transaction: its log is written back and cut."""
        yield
        with guarded(self.path):
            if self.path.with_name(self.path.name + "-wal").stat().st_size > WAL_ALLOWANCE:
                self.ask("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def file_bytes(self) -> int:
        """Length of the file once what is in its log is written back."""
        return int(self.ask("PRAGMA page_count")[0][0]) * 4096

    def check(self) -> str:
        """What SQLite finds wrong with the file; empty if nothing."""
        try:
            found = self.ask("PRAGMA integrity_check(1)")
        except IntegrityError as error:
            return error.message
        return "" if found == [("ok",)] else f"{self.path.name}: {found[0][0]}"

    def close(self) -> None:
        with self._lock:
            if self._read_only:
                self._db.close()
                return
            with close_lock(self.path.parent), guarded(self.path):
                self._db.close()


def _connect_read_only(path: Path, seconds: float) -> sqlite3.Connection:
    """A connection to a catalog that cannot be written; an empty one where none was made. One of
    an older version is brought up first, where that can be."""
    if path.exists():
        connection = connect_read_only(path, seconds)
        try:
            version = version_of(connection)
        except BaseException:
            connection.close()
            raise
        if version and version < VERSION and is_writable(path.parent):
            connection.close()
            CatalogDatabase(path, read_only=False).close()
            connection = connect_read_only(path, seconds)
        if version != 0:
            return connection
        connection.close()
    return _connect(":memory:", seconds)


def _connect(path: Path | str, seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=seconds, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA trusted_schema = off")
    return connection
