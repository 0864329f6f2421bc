"""Which entries running processes want to keep: a file a process, locked while it lives.

An ingest lists in its file the entries that must stay and those it is about to compute, so that
another process's eviction passes over them and another ingest computes something else. The kernel
drops the lock when a process ends, however it ends, and then its file counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.disk import is_abandoned, lock_own
from cache_store.errors import CacheblendError

LEASES = "leases"
"""Folder of these files, beside the chunk files."""

_KEPT, _COMPUTING = b"=", b"?"
_LINE = re.compile(rb"^([=?])([0-9a-f]{64})\n", re.MULTILINE)
_NAME = re.compile(r"[0-9a-f]{16}\.lease")
_LINE_BYTES = 66
_FIRST, _MOST_AT_ONCE = 4096, 2**18
_MAX_BYTES = 2**24  # of one file; what lies beyond is not listed, and not believed


def lease_bytes(keys: int) -> int:
    """Bytes on disk that listing so many keys takes at most."""
    size = min(_LINE_BYTES * keys, _MAX_BYTES)
    return size and -(-size // _FIRST) * _FIRST + _MOST_AT_ONCE


class Lease:
    """This process's file, made when there is something to list. A process forked off makes its
    own. Safe for threads."""

    def __init__(self, folder: Path, room: Callable[[int], AbstractContextManager[None]]) -> None:
        """room: within it, so many more bytes on disk are known to fit; raises StoreFullError."""
        self._folder, self._room = folder, room
        # Taken before a transaction is begun, never within one: growing the file needs one.
        self._lock = threading.RLock()
        self._process = 0
        self._path: Path | None = None
        self._descriptor = -1
        self._listed: dict[str, bytes] = {}
        self._length = self._taken = 0

    @property
    def path(self) -> Path | None:
        """The file, where there is one."""
        return self._path if self._process == os.getpid() else None

    @contextlib.contextmanager
    def ready(self, keys: int) -> Iterator[bool]:
        """Within, no other thread lists keys; and where there is room for so many more, which is
        told, `add` may be called in a transaction that is begun within."""
        with self._lock:
            room = False
            with contextlib.suppress(CacheblendError, OSError):
                if self._process != os.getpid():
                    self._begin()
                self._grow(self._length + _LINE_BYTES * keys)
                room = True
            yield room

    def add(self, keys: Iterable[str], *, computing: bool = False, grow: bool = True) -> bool:
        """Lists keys, as kept or as being computed; whether all of them are in the file now. grow:
        the file may take more space, which no transaction may be around.

        What can't be written, as in a store that is full, isn't listed: this process keeps its
        entries all the same, others may not.
        """
        mark = _COMPUTING if computing else _KEPT
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            new = [key for key in keys if self._listed.get(key) not in (mark, _KEPT)]
            data = b"".join(mark + key.encode() + b"\n" for key in new)
            if not data:
                return True
            if not grow and self._length + len(data) > self._taken:
                return False
            try:
                self._grow(self._length + len(data))
                os.pwrite(self._descriptor, data, self._length)
            except (CacheblendError, OSError):
                return False
            self._length += len(data)
            self._listed.update(dict.fromkeys(new, mark))
            return True

    def _begin(self) -> None:
        """Forgets what a process this one was forked off has; its file stays its own."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._process, self._path, self._descriptor = os.getpid(), None, -1
        self._listed, self._length, self._taken = {}, 0, 0

    def _grow(self, size: int) -> None:
        """Takes the file's space from the disk before anything is written to it."""
        if size <= self._taken:
            return
        if size > _MAX_BYTES:
            raise CacheblendError("too many keys in one lease")
        wanted = max(_FIRST, min(2 * self._taken, self._taken + _MOST_AT_ONCE), size)
        wanted = -(-wanted // _FIRST) * _FIRST
        # The folder takes a block, too.
        with self._room(wanted - self._taken + (0 if self._path else _FIRST)):
            if self._path is None:
                self._make()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, wanted)
            self._taken = wanted

    def _make(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if self._folder.is_symlink():  # through a link we'd write outside of the store
            raise CacheblendError(f"{self._folder} is a link")
        path = self._folder / f"{secrets.token_hex(8)}.lease"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        lock_own(descriptor)
        if not path.exists():  # swept before it was locked
            os.close(descriptor)
            raise CacheblendError(f"{path} is gone")
        self._descriptor, self._path = descriptor, path

    def close(self) -> None:
        """Removes the file: nothing is kept any more."""
        with self._lock:
            path = self.path
            self._begin()
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink()


@dataclass
class _Seen:
    """What was read of another process's file so far."""

    inode: int
    offset: int = 0
    kept: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)


class Leases:
    """What other living processes list. Their files only grow, so each is read once."""

    def __init__(self, folder: Path, own: Lease) -> None:
        self._folder, self._own = folder, own
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def listed(self) -> set[str]:
        """Keys of entries that are not to go."""
        return {key for seen in self._living() for key in seen.kept | seen.computing}

    def computing(self) -> set[str]:
        """Keys of entries that another process is about to store."""
        return {key for seen in self._living() for key in seen.computing}

    def __contains__(self, key: str) -> bool:
        return any(key in seen.kept or key in seen.computing for seen in self._living())

    def files(self) -> list[Path]:
        """All files there, of the living and the dead."""
        if self._folder.is_symlink():
            return []
        try:
            with os.scandir(self._folder) as items:
                return [Path(item.path) for item in items]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sweep(self) -> int:
        """Removes the files of processes that are gone. Within a transaction, as files are made
        in one. Returns how many."""
        swept = 0
        for path in self.files():
            if path != self._own.path and _NAME.fullmatch(path.name) and is_abandoned(path):
                with contextlib.suppress(OSError):
                    path.unlink()
                    swept += 1
        return swept

    def _living(self) -> list[_Seen]:
        with self._lock:
            found = {}
            for path in self.files():
                if path == self._own.path or not _NAME.fullmatch(path.name):
                    continue
                if (seen := self._read(path)) is not None:
                    found[path.name] = seen
            self._seen = found
            return list(found.values())

    def _read(self, path: Path) -> _Seen | None:
        if is_abandoned(path):
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            seen = self._seen.get(path.name)
            if seen is None or seen.inode != status.st_ino:
                seen = _Seen(status.st_ino)
            data = os.pread(descriptor, min(status.st_size, _MAX_BYTES) - seen.offset, seen.offset)
        finally:
            os.close(descriptor)
        for line in _LINE.finditer(data):
            mark, key = line.groups()
            if mark == _COMPUTING:
                seen.computing.add(key.decode())
            else:
                seen.computing.discard(key.decode())
                seen.kept.add(key.decode())
        seen.offset += data.rfind(b"\n") + 1  # the rest is still to be written
        return seen
