"""What the index and the catalog share: SQLite files of a store, and its errors in our words."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import diskcache

from cache_store.errors import CacheblendError, DamagedDatabase, NoSpace, StoreBusy

_Result = TypeVar("_Result")

BUSY_SECONDS = 20.0
"""How long a write waits for another process's."""

READ_SECONDS = 2.0
"""How long reading waits. It never waits for writers: only something that locks a whole database
makes it, and then it is better to do without."""

CHECKPOINT_PAGES = 100
WAL_ALLOWANCE = (CHECKPOINT_PAGES + 60) * 4120
"""Bytes a write-ahead log takes at most before it is written back, small transactions given."""

_JOURNAL = "-journal"
_SHARED_BYTES = 64 * 1024
SUFFIXES = ("", "-wal", "-shm", _JOURNAL)
"""What SQLite appends to a database's name for the files it keeps beside it."""

_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")  # ends a journal of several databases


@contextlib.contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turns what SQLite, diskcache and the disk raise into one line about the file at `path`.

    Raises StoreBusy for a file that is locked, DamagedDatabase for one that is damaged, and
    CacheblendError for a disk that is full or fails.
    """
    try:
        yield
    except diskcache.Timeout as error:
        raise _busy(path) from error
    except sqlite3.Error as error:
        raise _translated(path, error) from error
    except UnicodeDecodeError as error:  # SQLite's message quotes what isn't text
        raise damaged(path, "its tables are not described by text") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(path) from error
        raise CacheblendError(f"{error.filename or path}: {error.strerror or error}") from error


def _busy(path: Path) -> StoreBusy:
    return StoreBusy(
        f"{path} is in use by another process", "wait for it to finish, then try again"
    )


def _no_space(path: Path) -> NoSpace:
    return NoSpace(
        f"no space left on the disk at {path}",
        "free some, or give the store a smaller limit: cacheblend store limit SIZE",
    )


def _translated(path: Path, error: sqlite3.Error) -> CacheblendError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _busy(path)
    if code == sqlite3.SQLITE_FULL:
        return _no_space(path)
    if _lacks_space(path, error):
        return _no_space(path)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return CacheblendError(f"{path} cannot be opened or written: {error}")
    if code == sqlite3.SQLITE_IOERR:
        return CacheblendError(f"{path} cannot be read or written: {error}")
    return damaged(path, str(error))


def _lacks_space(path: Path, error: sqlite3.Error) -> bool:
    """Whether it failed as there is no room even for what connections share."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    failed = code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
    return failed and path.parent.is_dir() and free_bytes(path.parent) < _SHARED_BYTES


def damaged(path: Path, what: str) -> DamagedDatabase:
    """The error that says what is wrong with a database, and what to do about it."""
    return DamagedDatabase(f"{path} is damaged: {what}", start_anew(path))


def start_anew(path: Path) -> str:
    """What to do about a database that can't be used. The stored KV stays good without it."""
    if path.name == "catalog.db":
        return "ingest the documents again; the stored KV is kept"
    return "run: cacheblend store verify --repair, or ingest; the stored KV is kept"


def prepare_file(path: Path) -> None:
    """Makes a database's file, readable by its owner alone, before SQLite would.

    Raises DamagedDatabase where a link or something that isn't a file stands in its place, so
    that nothing outside the store is ever opened, and OSError as the disk does.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    check_files(path)


def check_files(path: Path) -> None:
    """Raises DamagedDatabase for a database any of whose files is a link or not a file, or whose
    journal names a file elsewhere, which SQLite would remove."""
    for suffix in SUFFIXES:
        beside = path.with_name(path.name + suffix)
        try:
            mode = beside.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise DamagedDatabase(f"{beside} is not a regular file", start_anew(path))
        if suffix == _JOURNAL and _tail(beside) == _NAMES_ANOTHER:
            raise damaged(path, "its journal is not one of ours")


def _tail(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # it may go just now
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_NAMES_ANOTHER)))
        return file.read(len(_NAMES_ANOTHER))
    return b""


def free_bytes(folder: Path) -> int:
    """Bytes left on a folder's disk for this user."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def is_writable(folder: Path) -> bool:
    """Whether this process may write in a folder."""
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def patiently(action: Callable[[], _Result], seconds: float = BUSY_SECONDS) -> _Result:
    """What `action` returns, tried again while another process has its database's file.

    Raises sqlite3.Error, also the busy one once the seconds are over. For what doesn't wait by
    itself: SQLite gives up at once, whatever the timeout, when it changes to WAL mode, and
    diskcache when it makes its tag index.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def connect_read_only(path: Path, seconds: float = BUSY_SECONDS) -> sqlite3.Connection:
    """A connection that cannot write, and waits that long for others. Raises sqlite3.Error.

    SQLite needs a writable folder to read a database others may be writing. Where the folder
    isn't, nobody is, and the file is read as it lies there. What a process that was killed while
    it made the database left half-written is taken back first, which such a connection can't.
    """
    address = f"file:{quote(str(path.resolve()))}?mode=ro"
    if not is_writable(path.parent):
        address += "&immutable=1"
    elif path.with_name(path.name + _JOURNAL).exists():  # with a log, there is none for long
        _take_back(path, seconds)
    try:
        return _connect(address, seconds)
    except sqlite3.OperationalError as error:
        log = path.with_name(path.name + "-wal")
        if not _lacks_space(path, error) or (log.exists() and log.stat().st_size):
            raise
    # On a full disk there is no room for what connections share. So nobody else has one, and
    # nobody can write: the file is whole as it lies there.
    return _connect(address + "&immutable=1", seconds)


def _connect(address: str, seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        address, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA trusted_schema = off")
        connection.execute("PRAGMA user_version").fetchall()  # opens the file
    except BaseException:
        connection.close()
        raise
    return connection


def _take_back(path: Path, seconds: float) -> None:
    """Has SQLite undo a change that its journal tells of, if nobody is at it."""
    check_files(path)
    connection = sqlite3.connect(path, timeout=seconds, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema = off")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    finally:
        connection.close()


def inode(path: Path) -> tuple[int, int]:
    """Which file is at `path`: another one once a database was made anew.

    Raises DamagedDatabase where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise damaged(path, "it is gone") from None
    return status.st_dev, status.st_ino
