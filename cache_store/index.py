"""The index of a store: which entries there are, in which file, when each was last used.

A diskcache `Cache` holds two kinds of rows. An entry's row names its file and, as its tag, its
group, with "saved:" before it where a prompt saved the entry and no ingest wanted it. A group's row
is the small JSON list of the group's entries, its tag the id of the chunk's text. Both change in
the same transaction. diskcache has no query by last use or for a row's own columns, so those few
are asked of its connection; nothing outside this module touches its insides.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diskcache import Cache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_BINARY, MODE_RAW

from cache_store.database import (
    BUSY_SECONDS,
    CHECKPOINT_PAGES,
    SUFFIXES,
    WAL_ALLOWANCE,
    check_files,
    connect_read_only,
    guarded,
    patiently,
    prepare_file,
)
from cache_store.disk import PARTIAL, ChunkDisk, StagedFile
from cache_store.errors import IntegrityError
from cache_store.group import Group

_SETTINGS: dict[str, int | str] = {
    "statistics": 0,
    "tag_index": 1,
    "eviction_policy": "least-recently-used",
    "cull_limit": 0,  # we evict, whole entries and never a protected one; diskcache doesn't
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2**10,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,  # a file cut short by someone else is an error then, not a crash
    "sqlite_synchronous": 1,
    "sqlite_wal_autocheckpoint": CHECKPOINT_PAGES,
    "sqlite_journal_size_limit": WAL_ALLOWANCE,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": 0,
}
_KNOWN_SETTINGS = {*_SETTINGS, *DEFAULT_SETTINGS, *METADATA}
_KNOWN_OBJECTS = {
    "Settings",
    "sqlite_autoindex_Settings_1",
    "Cache",
    "Cache_key_raw",
    "Cache_expire_time",
    "Cache_access_time",
    "Cache_tag_rowid",
    "Settings_count_insert",
    "Settings_count_delete",
    "Settings_size_insert",
    "Settings_size_update",
    "Settings_size_delete",
}
_PAGE = 4096
_AT_ONCE = 500  # values in one query
_TOUCHES = 64
_TOUCH_SECONDS = 1.0
_TOUCHES_AT_ONCE = 16  # rows: a transaction is to stay small, as its log is not reserved
_SAVED, _AFTER_SAVED = "saved:", "saved;"
_COLUMNS = "key, raw, tag, size, mode, filename, store_time, access_time, access_count"


@dataclass(frozen=True)
class EntryRow:
    """An entry as the index has it. size: bytes on disk; times in seconds since the epoch. saved:
    by a prompt, and no ingest has wanted it."""

    key: str
    group: str
    size: int
    path: Path
    stored_at: float
    used_at: float
    hits: int
    saved: bool = False


@dataclass(frozen=True)
class Use:
    """How much an entry was used: what decides which goes first."""

    key: str
    group: str
    used_at: float
    hits: int


class Index:
    """Use from several threads and processes at once is fine; transactions wait for each other.

    Methods raise IntegrityError for an index that is damaged or holds what we never write, and
    CacheblendError where it is locked or the disk fails.
    """

    def __init__(self, directory: Path, *, read_only: bool, size_limit: int | None = None) -> None:
        """size_limit: of a new index, in bytes; one that is there already keeps its own."""
        self.path = directory / DBNAME
        self._touches: dict[str, tuple[float, int]] = {}  # uses to be noted: when, how often
        self._touched_since = 0.0
        self._lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        with guarded(self.path):
            # An empty file is what a crash leaves of a database that was about to be made.
            there = self.path.exists() and (read_only or self.path.stat().st_size > 0)
            found = self._look() if there else None
            limit = found if found is not None else size_limit
            if read_only:
                self._reader = connect_read_only(self.path)
                self.disk = ChunkDisk(str(directory))
                self._limit = limit or 0
                return
            prepare_file(self.path)
            settings = {**_SETTINGS, "size_limit": limit or 0}
            self._cache = patiently(
                lambda: Cache(str(directory), timeout=BUSY_SECONDS, disk=ChunkDisk, **settings)
            )
            self.disk = self._cache.disk
        if found is None:
            self._clear(directory)

    def _clear(self, directory: Path) -> None:
        """Removes what an index that is gone left behind: files that no row will ever name, which
        would take up the limit for good."""
        with self.transaction():
            for path in set(directory.glob("*.kv")) - {directory / name for name in self.names()}:
                if not path.is_dir() or path.is_symlink():
                    path.unlink(missing_ok=True)

    def _look(self) -> int | None:
        """Checks, before diskcache obeys them, that the settings are of the kind we write.
        Returns the size limit they hold."""
        check_files(self.path)
        connection = connect_read_only(self.path)
        try:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            settings = (
                dict(connection.execute("SELECT key, value FROM Settings").fetchall())
                if "Settings" in names
                else {}
            )
        finally:
            connection.close()
        strange = (names - _KNOWN_OBJECTS) | (settings.keys() - _KNOWN_SETTINGS)
        strange |= {
            key
            for key, value in settings.items()
            if type(value) is not type(_SETTINGS.get(key, DEFAULT_SETTINGS.get(key, 0)))
        }
        if strange:
            raise IntegrityError(
                f"{self.path} is not an index of ours: it holds {sorted(map(str, strange))[0]!r}",
                f"delete the folder {self.path.parent} and ingest again",
            )
        return settings.get("size_limit")

    # Reading.

    def _ask(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with guarded(self.path):
            if self._reader is None:
                return self._cache._sql(sql, values).fetchall()  # type: ignore[no-any-return]
            with self._lock:
                return self._reader.execute(sql, values).fetchall()

    def entry(self, key: str) -> EntryRow | None:
        """The row of one entry. Raises IntegrityError for a row we'd never write."""
        rows = self._ask(f"SELECT {_COLUMNS} FROM Cache WHERE key = ? AND raw = 1", (key,))
        return self._entry(*rows[0]) if rows else None

    def group(self, key: str) -> Group | None:
        """The list of a group's entries."""
        rows = self._ask(
            "SELECT mode, filename, value FROM Cache WHERE key = ? AND raw = 1", (key,)
        )
        if not rows:
            return None
        mode, filename, value = rows[0]
        if filename is not None:
            raise IntegrityError(
                f"the index's list of entries of chunk {key[:12]} is damaged",
                "run: cacheblend store verify --repair",
            )
        return Group.decode(key, self.disk.fetch(mode, filename, value, False))

    def entries(self, *, by_use: bool = False) -> Iterator[EntryRow | IntegrityError]:
        """All entries, in the order they were stored or, by_use, least recently used first.
        In the place of a row we'd never write comes the error that says so."""
        order = "access_time, rowid" if by_use else "rowid"
        for row in self._ask(f"SELECT {_COLUMNS} FROM Cache ORDER BY {order}"):
            if not self._is_group(*row[:6]):
                try:
                    yield self._entry(*row)
                except IntegrityError as error:
                    yield error

    def groups(self) -> Iterator[tuple[str, Group | IntegrityError]]:
        """All groups and their keys; the error in the place of one that can't be read."""
        for *row, value in self._ask(
            f"SELECT {_COLUMNS}, value FROM Cache WHERE filename IS NULL ORDER BY rowid"
        ):
            if self._is_group(*row[:6]):
                try:
                    yield row[0], Group.decode(row[0], self.disk.fetch(row[4], None, value, False))
                except IntegrityError as error:
                    yield row[0], error

    def _is_group(
        self, key: object, raw: object, tag: object, size: object, mode: object, name: object
    ) -> bool:
        if mode != MODE_RAW or name is not None or not isinstance(tag, str | None):
            return False
        try:
            self.disk.get(key, raw)
        except IntegrityError:
            return False
        return True

    def groups_of(self, chunk_id: str) -> list[Group]:
        """The groups of a chunk's text, one a model; those that can't be read are left out."""
        rows = self._ask(
            "SELECT key FROM Cache WHERE tag = ? AND filename IS NULL AND raw = 1", (chunk_id,)
        )
        found = []
        for (key,) in rows:
            with contextlib.suppress(IntegrityError):
                group = self.group(key)
                if group is not None:
                    found.append(group)
        return found

    def entries_of(self, group: str) -> list[EntryRow]:
        """The entries whose rows name this group, whatever its list says."""
        rows = self._ask(
            f"SELECT {_COLUMNS} FROM Cache WHERE tag IN (?, ?) AND filename IS NOT NULL",
            (group, _SAVED + group),
        )
        found = []
        for row in rows:
            with contextlib.suppress(IntegrityError):
                found.append(self._entry(*row))
        return found

    def _entry(
        self,
        key: object,
        raw: object,
        tag: object,
        size: int,
        mode: int,
        name: object,
        stored: float,
        used: float,
        hits: int,
    ) -> EntryRow:
        key = self.disk.get(key, raw)
        if mode != MODE_BINARY or not isinstance(tag, str):
            raise IntegrityError(
                f"the store's index has a row of a kind it never writes (mode {mode!r}); "
                "it was not loaded",
                "run: cacheblend store verify --repair",
            )
        group, saved = tag.removeprefix(_SAVED), tag.startswith(_SAVED)
        return EntryRow(key, group, size, self.disk.path_of(name), stored, used, hits, saved)

    def uses(self, *, saved: bool) -> Iterator[Use]:
        """The uses of all entries that prompts saved, or of all others, in no order."""
        inside = "tag >= ? AND tag < ?" if saved else "NOT (tag >= ? AND tag < ?)"
        rows = self._ask(
            "SELECT key, tag, access_time, access_count FROM Cache"
            f" WHERE {inside} AND filename IS NOT NULL AND raw = 1",
            (_SAVED, _AFTER_SAVED),
        )
        for key, tag, used, hits in rows:
            yield Use(key, tag.removeprefix(_SAVED), used, hits)

    def groups_of_chunks(self, chunk_ids: Iterable[str]) -> set[str]:
        """Keys of the groups of any of these chunks' texts."""
        wanted = list(chunk_ids)
        found: set[str] = set()
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            marks = ",".join("?" * len(some))
            sql = f"SELECT key FROM Cache WHERE tag IN ({marks}) AND filename IS NULL"
            found.update(key for (key,) in self._ask(sql, some))
        return found

    def sizes(self) -> Iterator[tuple[str, str, int]]:
        """Key, group and bytes on disk of all entries."""
        rows = self._ask(
            "SELECT key, tag, size FROM Cache WHERE filename IS NOT NULL AND tag IS NOT NULL"
        )
        for key, tag, size in rows:
            yield key, tag.removeprefix(_SAVED), size

    @property
    def file_bytes(self) -> int:
        """Length of the database's file once what is in its log is written back."""
        return int(self._ask("PRAGMA page_count")[0][0]) * _PAGE

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk of all entries' files; other processes' too."""
        rows = self._ask("SELECT value FROM Settings WHERE key = 'size'")
        return int(rows[0][0]) if rows else 0

    def names(self) -> set[str]:
        """File names of all entries."""
        return {
            name for (name,) in self._ask("SELECT filename FROM Cache WHERE filename IS NOT NULL")
        }

    def check(self) -> str:
        """What SQLite finds wrong with the file; empty if nothing."""
        try:
            found = self._ask("PRAGMA quick_check(1)")
        except IntegrityError as error:
            return error.message
        return "" if found == [("ok",)] else f"{self.path.name}: {found[0][0]}"

    # Writing.

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within happens or none of it, files included; others wait."""
        self.disk.defer()
        committed = False
        try:
            with guarded(self.path):
                try:
                    with self._cache.transact():
                        yield
                    committed = True
                finally:
                    if not committed and self._cache._con.in_transaction:  # the commit failed
                        self._cache._con.rollback()
        finally:
            self.disk.settle(committed, self._is_named)

    def _is_named(self, filename: str) -> bool:
        return bool(self._ask("SELECT 1 FROM Cache WHERE filename = ?", (filename,)))

    def set_entry(self, key: str, staged: StagedFile, group: str, saved: bool = False) -> None:
        """Puts a written file in place under `key`. Within a transaction."""
        self._cache.set(key, staged, read=True, tag=_SAVED + group if saved else group)

    def promote(self, row: EntryRow) -> None:
        """An entry that a prompt saved is wanted by an ingest from now on."""
        with self.transaction():
            self._cache._sql(
                "UPDATE Cache SET tag = ? WHERE key = ? AND raw = 1 AND tag = ?",
                (row.group, row.key, _SAVED + row.group),
            )

    def set_group(self, key: str, group: Group) -> None:
        """Writes a group's list; an empty one is removed. Within a transaction."""
        if group.members:
            self._cache.set(key, group.encode(), tag=group.chunk_id or None)
        else:
            self._cache.delete(key)

    def delete(self, key: str) -> None:
        """Removes a row and, when the transaction is through, its file."""
        self._cache.delete(key)

    def delete_strange_rows(self) -> int:
        """Removes the rows `entries` gives errors for. No file they may name is touched."""
        strange = []
        with self.transaction():
            for rowid, *row in self._ask(f"SELECT rowid, {_COLUMNS} FROM Cache"):
                if not self._is_group(*row[:6]):
                    try:
                        self._entry(*row)
                    except IntegrityError:
                        strange.append((rowid,))
            self._cache._con.executemany("DELETE FROM Cache WHERE rowid = ?", strange)
        return len(strange)

    def touch(self, key: str) -> None:
        """Notes that an entry was used. Written now and then, several at once, and never while
        another process writes, so that a prompt doesn't wait for it."""
        now = time.time()
        with self._lock:
            if not self._touches:
                self._touched_since = now
            _, hits = self._touches.get(key, (0.0, 0))
            self._touches[key] = (now, hits + 1)
            if len(self._touches) >= _TOUCHES or now - self._touched_since > _TOUCH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Writes the uses that are still to be noted, if nobody else is writing now and the log
        isn't longer than it should be, as while somebody reads."""
        with self._lock, guarded(self.path):
            connection = self._cache._con
            alone = not connection.in_transaction
            if not self._touches or (alone and not self._log_is_short(connection)):
                return
            try:
                connection.execute("PRAGMA busy_timeout = 0")
                while self._touches:
                    some = list(self._touches.items())[:_TOUCHES_AT_ONCE]
                    if alone:
                        connection.execute("BEGIN IMMEDIATE")
                    connection.executemany(
                        "UPDATE Cache SET access_time = ?, access_count = access_count + ?"
                        " WHERE key = ? AND raw = 1",
                        [(used, hits, key) for key, (used, hits) in some],
                    )
                    if alone:
                        connection.execute("COMMIT")
                    for key, _ in some:
                        del self._touches[key]
            except sqlite3.OperationalError:  # only the order of eviction is at stake
                if alone and connection.in_transaction:
                    connection.rollback()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")

    def _log_is_short(self, connection: sqlite3.Connection) -> bool:
        """Whether the log is within its allowance, or could be written back and cut just now."""
        log = self.path.with_name(self.path.name + SUFFIXES[1])
        if not log.exists() or log.stat().st_size <= WAL_ALLOWANCE:
            return True
        connection.execute("PRAGMA busy_timeout = 0")
        ((busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
        return not busy

    @property
    def limit(self) -> int:
        """The size limit in bytes, as any process set it last."""
        rows = self._ask("SELECT value FROM Settings WHERE key = 'size_limit'")
        return int(rows[0][0]) if rows else self._limit

    def set_limit(self, limit: int) -> None:
        """Sets the size limit, in bytes, for every process."""
        with guarded(self.path):
            self._cache.reset("size_limit", limit)

    def close(self) -> None:
        """Notes what is to be noted and closes this thread's connection."""
        if self._reader is not None:
            self._reader.close()
            return
        with guarded(self.path):
            self.flush()
            self._cache.close()

    @staticmethod
    def prepare(directory: Path) -> None:
        """Makes an index's folders, for their owner alone. Raises OSError."""
        for folder in (directory, directory / PARTIAL):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
