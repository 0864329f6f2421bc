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
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diskcache.core import MODE_BINARY, MODE_RAW

from cache_store.database import (
    BUSY_SECONDS,
    SUFFIXES,
    WAL_ALLOWANCE,
)
from cache_store.disk import StagedFile
from cache_store.errors import CacheblendError, IntegrityError, StoreBusy
from cache_store.group import Group
from cache_store.index_database import COLUMNS, IndexDatabase
from cache_store.locks import folder_lock

_PAGE = 4096
_AT_ONCE = 500  # values in one query
_TOUCHES = 1024
_TOUCH_SECONDS = 30.0
_TOUCHES_AT_ONCE = 16  # rows: a transaction is to stay small, as its log is not reserved
_SAVED, _AFTER_SAVED = "saved:", "saved;"


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


class Index(IndexDatabase):
    """Use from several threads and processes at once is fine; transactions wait for each other.

    Methods raise DamagedDatabase for an index that is damaged, IntegrityError for a row we'd never
    write, StoreBusy where it is locked, and CacheblendError where the disk fails.
    """

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
        self._touches: dict[str, tuple[float, int]] = {}  # uses to be noted: when, how often
        self._touched_since = 0.0
        self._last_use = 0.0
        super().__init__(directory, read_only=read_only, size_limit=size_limit, patience=patience)

    def close(self) -> None:
        """Notes what is to be noted and closes this thread's connection."""
        if self._reader is None:
            self.flush()
        super().close()

    # Reading.

    def entry(self, key: str) -> EntryRow | None:
        """The row of one entry. Raises IntegrityError for a row we'd never write."""
        rows = self._ask(f"SELECT {COLUMNS} FROM Cache WHERE key = ? AND raw = 1", (key,))
        return self._entry(*rows[0]) if rows else None

    def file_of(self, key: str) -> str | None:
        """Path of one entry's file, checked as `entry` does."""
        rows = self._ask("SELECT tag, mode, filename FROM Cache WHERE key = ? AND raw = 1", (key,))
        if not rows:
            return None
        tag, mode, name = rows[0]
        self._check(tag, mode)
        return self._folder + self.disk.checked_name(name)

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
        for row in self._ask(f"SELECT {COLUMNS} FROM Cache ORDER BY {order}"):
            if not self._is_group(*row[:6]):
                try:
                    yield self._entry(*row)
                except IntegrityError as error:
                    yield error

    def groups(self) -> Iterator[tuple[str, Group | IntegrityError]]:
        """All groups and their keys; the error in the place of one that can't be read."""
        for *row, value in self._ask(
            f"SELECT {COLUMNS}, value FROM Cache WHERE filename IS NULL ORDER BY rowid"
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
            f"SELECT {COLUMNS} FROM Cache WHERE tag IN (?, ?) AND filename IS NOT NULL",
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
        tag = self._check(tag, mode)
        group, saved = tag.removeprefix(_SAVED), tag.startswith(_SAVED)
        return EntryRow(key, group, size, self.disk.path_of(name), stored, used, hits, saved)

    @staticmethod
    def _check(tag: object, mode: object) -> str:
        if mode != MODE_BINARY or not isinstance(tag, str):
            raise IntegrityError(
                f"the store's index has a row of a kind it never writes (mode {mode!r}); "
                "it was not loaded",
                "run: cacheblend store verify --repair",
            )
        return tag

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

    def uses_by_time(self) -> Iterator[Use]:
        """The uses of the entries that no prompt alone saved, least recent first. Looked up a part
        at a time, so that the first of many cost little."""
        after = (-1.0, -1)
        while True:
            rows = self._ask(
                "SELECT access_time, rowid, key, tag, access_count, filename FROM Cache"
                " WHERE (access_time, rowid) > (?, ?) ORDER BY access_time, rowid LIMIT 2000",
                after,
            )
            if not rows:
                return
            for used, _, key, tag, hits, name in rows:
                if name is not None and isinstance(tag, str) and not tag.startswith(_SAVED):
                    yield Use(key, tag, used, hits)
            after = rows[-1][:2]

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

    def miscounted(self) -> bool:
        """Whether `stored_bytes` isn't what the rows add up to."""
        rows = self._ask(
            "SELECT (SELECT value FROM Settings WHERE key = 'size'), coalesce(sum(size), 0),"
            " total(size < 0) FROM Cache"
        )
        counted, total, negative = rows[0]
        return bool(counted != total or negative)

    def names(self) -> set[str]:
        """File names of all entries."""
        return set(self.file_sizes())

    def file_sizes(self) -> dict[str, int]:
        """Bytes on disk of all entries' files, by their names."""
        return dict(self._ask("SELECT filename, size FROM Cache WHERE filename IS NOT NULL"))

    # Writing.

    def set_entry(self, key: str, staged: StagedFile, group: str, saved: bool = False) -> None:
        """Puts a written file in place under `key`. Within a transaction."""
        with self._lock:
            now, clock = self._now(), time.time()
        self._cache.set(key, staged, read=True, tag=_SAVED + group if saved else group)
        if now > clock:  # the clock was set back: it is still the one used last
            self._cache._sql("UPDATE Cache SET access_time = ? WHERE key = ?", (now, key))

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
            for rowid, *row in self._ask(f"SELECT rowid, {COLUMNS} FROM Cache"):
                if not self._is_group(*row[:6]):
                    try:
                        self._entry(*row)
                    except IntegrityError:
                        strange.append((rowid,))
            self._cache._con.executemany("DELETE FROM Cache WHERE rowid = ?", strange)
        return len(strange)

    def count_anew(self) -> None:
        """Puts `stored_bytes` right."""
        with self.transaction():
            self._cache._con.execute(
                "INSERT OR REPLACE INTO Settings VALUES ('size', (SELECT coalesce(sum(size), 0)"
                " FROM Cache))"
            )

    def touch(self, key: str) -> None:
        """Notes that an entry was used. Written by `flush`; here only where nobody called that for
        long, as a prompt waits for it, and never while another process writes."""
        with self._lock:
            now = self._now()
            if not self._touches:
                self._touched_since = now
            _, hits = self._touches.get(key, (0.0, 0))
            self._touches[key] = (now, hits + 1)
            if len(self._touches) >= _TOUCHES or now - self._touched_since > _TOUCH_SECONDS:
                self.flush()

    def _now(self) -> float:
        """The time, or just after the last use where the clock was set back since: what is used
        now is never what was used longest ago."""
        if not self._last_use:
            with contextlib.suppress(IntegrityError, StoreBusy):
                found = self._ask("SELECT access_time FROM Cache ORDER BY access_time DESC LIMIT 1")
                self._last_use = float(found[0][0] or 0.0) if found else 0.0
        now = time.time()
        self._last_use = now if now > self._last_use else self._last_use + 1e-6
        return self._last_use

    def flush(self) -> None:
        """Writes the uses that are still to be noted, if nobody else is writing now and the log
        isn't longer than it should be, as while somebody reads. Only the order of eviction is at
        stake, so what goes wrong is passed over."""
        with self._lock, contextlib.suppress(CacheblendError, OSError, sqlite3.Error):
            if not self._touches:
                return
            if self._in_transaction():
                self._note_uses(list(self._touches))
                self._touches.clear()
                return
            self._follow()
            folder = self.path.parent.parent
            with folder_lock(folder, alone=False, patience=0), self._waiting(0):
                connection = self._cache._con
                try:
                    while self._touches and self._log_is_short(connection):
                        connection.execute("BEGIN IMMEDIATE")
                        some = list(self._touches)[:_TOUCHES_AT_ONCE]
                        self._note_uses(some)
                        connection.execute("COMMIT")
                        for key in some:
                            del self._touches[key]
                finally:
                    if connection.in_transaction:
                        connection.rollback()

    def _note_uses(self, keys: list[str]) -> None:
        self._cache._con.executemany(
            "UPDATE Cache SET access_time = ?, access_count = access_count + ?"
            " WHERE key = ? AND raw = 1",
            [(*self._touches[key], key) for key in keys],
        )

    def _log_is_short(self, connection: sqlite3.Connection) -> bool:
        """Whether the log is within its allowance, or could be written back and cut just now."""
        log = self.path.with_name(self.path.name + SUFFIXES[1])
        if not log.exists() or log.stat().st_size <= WAL_ALLOWANCE:
            return True
        ((busy, _, _),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return not busy
