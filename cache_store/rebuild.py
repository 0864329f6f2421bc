"""Puts a new database in the place of a damaged one: the index from the chunk files themselves,
whose headers hold all it has to know; the catalog empty, for its texts are nowhere else."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from diskcache.core import DBNAME, MODE_BINARY, MODE_RAW

from cache_store.catalog import CATALOG_NAME, SET_ASIDE, Catalog
from cache_store.database import (
    BUSY_SECONDS,
    SUFFIXES,
    check_files,
    connect_read_only,
    damaged,
    guarded,
)
from cache_store.disk import PARTIAL, REBUILDING
from cache_store.entry import EntryHeader, read_header
from cache_store.errors import (
    CacheblendError,
    DamagedDatabase,
    DamagedEntry,
    IntegrityError,
    NotFoundError,
    StoreBusy,
    UnreadableEntry,
)
from cache_store.group import Group
from cache_store.index_database import IndexDatabase
from cache_store.index_file import look_at, new_cache
from cache_store.locks import folder_lock
from cache_store.place import KV_FOLDER, MIN_LIMIT, default_limit
from cache_store.results import Problem
from cache_store.space import disk_usage

OnDamage = Literal["raise", "go_on", "mend"]
Check = Literal["none", "quick_check", "integrity_check"]


def index_fault(
    root: Path, *, check: Check = "none", patience: float = BUSY_SECONDS
) -> DamagedDatabase | None:
    """What is wrong with a store's index; None where it is sound, or nothing is there yet.

    check: SQLite's, which read all of it; the quick one doesn't compare its parts. Raises
    StoreBusy where it stays locked, for `patience` seconds.
    """
    path = root / KV_FOLDER / DBNAME
    try:
        with guarded(path):
            there = os.path.lexists(path) and path.lstat().st_size > 0
            if there and look_at(path, patience) is not None:
                return _inner_fault(path, check)
            if any(_chunk_files(root / KV_FOLDER)):
                return damaged(path, "it is empty" if path.exists() else "it is gone")
    except DamagedDatabase as error:
        return error
    return None


def catalog_fault(root: Path, *, check: Check = "none") -> DamagedDatabase | None:
    """The same of a store's catalog. Raises IntegrityError for one that a later version made."""
    path = root / CATALOG_NAME
    try:
        if (lost := lost_catalog(root)) and _has_chunks(root / KV_FOLDER):
            return lost
        if os.path.lexists(path):
            Catalog(path, read_only=True).close()
            with guarded(path):
                return _inner_fault(path, check)
    except DamagedDatabase as error:
        return error
    return None


def lost_catalog(root: Path) -> DamagedDatabase | None:
    """What is wrong with a catalog without a byte. It is made before the first entry is, so it's
    lost where the index has entries of chunks."""
    path = root / CATALOG_NAME
    if os.path.lexists(path) and path.lstat().st_size:
        return None
    return damaged(path, "it is empty" if path.exists() else "it is gone")


def _has_chunks(kv: Path) -> bool:
    try:
        with contextlib.closing(IndexDatabase(kv, read_only=True)) as index:
            return index.has_chunks()
    except NotFoundError:
        return False


def _inner_fault(path: Path, check: Check) -> DamagedDatabase | None:
    if check == "none":
        return None
    with contextlib.closing(connect_read_only(path)) as connection:
        found = connection.execute(f"PRAGMA {check}(1)").fetchone()[0]
    return None if found == "ok" else damaged(path, str(found))


def is_lost(root: Path) -> bool:
    """Whether there are chunk files and no index of them."""
    path = root / KV_FOLDER / DBNAME
    there = os.path.lexists(path) and path.lstat().st_size > 0
    return not there and any(_chunk_files(root / KV_FOLDER))


def mend(root: Path, *, limit: int | None = None, check: Check = "quick_check") -> list[Problem]:
    """Makes anew what is damaged of the databases of the store at `root`; says what was done.

    limit: of the store where the index doesn't tell it any more. Processes that have the store
    open go over to the new databases; only one of those that meet the damage mends it. Raises
    StoreBusy where others write for too long, CacheblendError where the disk fails.
    """
    if not _faulty(root, check):
        return []
    done: list[Problem] = []
    with guarded(root), folder_lock(root, alone=True):
        if fault := index_fault(root, check=check):  # nobody was faster
            done += _rebuild_index(root, fault, limit)
        if fault := catalog_fault(root, check=check):
            aside = _set_catalog_aside(root)
            _begin_catalog(root)
            done.append(as_problem(fault, f"; {aside}a new one begun"))
    return done


def _faulty(root: Path, check: Check) -> bool:
    try:
        # Both are asked: one of an older version is brought up by that, which can't be done alone.
        return any([index_fault(root, check=check), catalog_fault(root, check=check)])
    except StoreBusy:
        raise
    except CacheblendError:  # as while another mends it: to be looked at alone
        return True


def as_problem(fault: DamagedDatabase, done: str = "") -> Problem:
    """A fault of a database, as it is told."""
    name = CATALOG_NAME if CATALOG_NAME in fault.message else f"{KV_FOLDER}/{DBNAME}"
    return Problem(name, _what(fault) + done)


def _what(fault: IntegrityError) -> str:
    return fault.message.partition(" is ")[2] or fault.message


def _rebuild_index(root: Path, fault: DamagedDatabase, limit: int | None) -> list[Problem]:
    """The new index is put in place whole. Killed before, the old one is gone: then the index
    counts as lost, and the next one here makes it anew."""
    kv = root / KV_FOLDER
    limit = _limit_of(kv / DBNAME) or max(limit or default_limit(root), disk_usage(root), MIN_LIMIT)
    _remove_database(kv / DBNAME)
    sound, problems = _sound_files(kv)
    with _workplace(kv) as workplace:
        cache = new_cache(workplace, limit)
        try:
            _write_rows(cache._con, sound)
        finally:
            cache.close()
        (workplace / DBNAME).chmod(0o600)
        (workplace / DBNAME).rename(kv / DBNAME)
    return [as_problem(fault, f"; made anew from {len(sound)} chunk files"), *problems]


def _limit_of(path: Path) -> int | None:
    """The size limit, if so much of the index can still be read."""
    with contextlib.suppress(sqlite3.Error, DamagedDatabase, OSError, TypeError, ValueError):
        check_files(path)  # a link or a pipe isn't opened
        with contextlib.closing(connect_read_only(path)) as connection:
            rows = connection.execute("SELECT value FROM Settings WHERE key = 'size_limit'")
            found = int(rows.fetchone()[0])
        return found if MIN_LIMIT <= found < 2**62 else None
    return None


def _remove_database(path: Path) -> None:
    """The database first: one that is there without its log would look sound, and old."""
    for suffix in SUFFIXES:
        beside = path.with_name(path.name + suffix)
        if beside.is_dir() and not beside.is_symlink():
            beside.rmdir()  # not ours; what is in it stays, and the error says so
        else:
            beside.unlink(missing_ok=True)


def _set_catalog_aside(root: Path) -> str:
    """Returns what was done, in words."""
    path, done = root / CATALOG_NAME, ""
    if path.is_file() and not path.is_symlink() and path.stat().st_size:
        path.replace(root / SET_ASIDE)
        done = f"set aside as {SET_ASIDE}, and "
    _remove_database(path)
    return done


def _begin_catalog(root: Path) -> None:
    """An empty catalog, put in place whole: one that isn't there counts as lost."""
    with _workplace(root / KV_FOLDER) as folder:
        Catalog(folder / CATALOG_NAME, read_only=False).close()
        (folder / CATALOG_NAME).rename(root / CATALOG_NAME)


@contextlib.contextmanager
def _workplace(kv: Path) -> Iterator[Path]:
    """A new folder within the store; what is left of it in the end goes."""
    folder = kv / PARTIAL / REBUILDING
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _chunk_files(kv: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(kv) as items:
        for item in items:
            if item.name.endswith(".kv"):
                yield item


def _sound_files(kv: Path) -> tuple[list[tuple[EntryHeader, Path]], list[Problem]]:
    """Chunk files with good headers, oldest first, one an entry; what else there was is removed.

    Layers are not read: their checksums are checked before they are used.
    """
    sound: dict[str, tuple[EntryHeader, Path]] = {}
    problems: list[Problem] = []
    items = [(item.stat(follow_symlinks=False).st_mtime, item.path) for item in _chunk_files(kv)]
    for _, name in sorted(items):
        path = Path(name)
        try:
            header = read_header(path)
            if path.name.partition(".")[0] != header.key:
                raise DamagedEntry(f"chunk file {path.name} holds another chunk")
        except UnreadableEntry as error:
            problems.append(Problem(f"{KV_FOLDER}/{path.name}", error.message))
            continue
        except DamagedEntry as error:
            if not stat.S_ISDIR(path.lstat().st_mode):
                path.unlink()
                problems.append(Problem(f"{KV_FOLDER}/{path.name}", error.message))
            continue
        if header.key in sound:  # an older one of the same entry
            sound.pop(header.key)[1].unlink()
        sound[header.key] = header, path
    return list(sound.values()), problems


_INSERT = (
    "INSERT INTO Cache (key, raw, store_time, access_time, tag, size, mode, filename, value)"
    " VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?)"
)


def _write_rows(connection: sqlite3.Connection, sound: list[tuple[EntryHeader, Path]]) -> None:
    """The rows that `Index` would have written; a file's time stands for its last use."""
    groups: dict[str, tuple[float, Group]] = {}
    rows: list[tuple[object, ...]] = []
    for header, path in sound:
        status = path.lstat()
        time, size = status.st_mtime, status.st_blocks * 512
        rows.append((header.key, time, time, header.group, size, MODE_BINARY, path.name, None))
        group = Group.of(header)
        known = groups.get(header.group)
        groups[header.group] = time, known[1].with_members_of(group) if known else group
    rows += [
        (key, time, time, group.chunk_id or None, 0, MODE_RAW, None, group.encode())
        for key, (time, group) in groups.items()
    ]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(_INSERT, rows)
    connection.execute("COMMIT")
