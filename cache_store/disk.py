"""How diskcache puts our values on disk: whole files in place, small bytes inline, no pickle.

diskcache's own `Disk` unpickles whatever a row says is a pickle, which lets anyone who can write
to the index run code (CVE-2025-69872). This one knows three things only: keys that are hashes,
bytes inline, and chunk files by names of one form. Everything else in the index is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from diskcache import Disk
from diskcache.core import MODE_BINARY, MODE_RAW, UNKNOWN

from cache_store.errors import IntegrityError

PARTIAL = "partial"
"""Folder of files still being written. Beside the finished ones: renaming moves no data."""

REBUILDING = "rebuild"
"""Folder in that one, in which a new index is made in the place of a damaged one."""

_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}\.kv")
_ABANDONED_SECONDS = 3600.0
_LOCK_SECONDS = 1.0


def lock_own(descriptor: int) -> None:
    """Locks a file that this process made, for as long as it lives.

    Somebody may be looking whether it is locked, which takes a moment; where files can't be locked,
    age decides."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.0005)
        except OSError:
            return


def lock_unused(path: Path) -> int | None:
    """A descriptor of a chunk file that nobody reads, locked; None for one in use, this process's
    own readers included. -1 where there is nothing to lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # no locks on this file system
        pass
    return descriptor


class StagedFile:
    """A file that is written under a temporary name and then put in place whole.

    It takes its `size` bytes from the disk when it is made. A lock held on it tells other
    processes that its writer lives. Until `publish`, closing it removes it.

    claim: it is only that long and takes nothing: others count it as bytes that are spoken for.
    """

    def __init__(self, directory: Path, name: str, size: int, *, claim: bool = False) -> None:
        self.name = name
        self._place = directory / name
        self._path = directory / PARTIAL / name
        self._published = False
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self.descriptor = os.open(self._path, flags, 0o600)
        try:
            lock_own(self.descriptor)
            if claim:
                os.ftruncate(self.descriptor, size)
            elif size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, size)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Where the file is now."""
        return self._place if self._published else self._path

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        os.fsync(self.descriptor)

    def publish(self) -> int:
        """Puts the file in place; returns the bytes it takes on disk. Its data is on the disk
        before its name is, and its name before the index can speak of it."""
        self.sync()
        taken = os.fstat(self.descriptor).st_blocks * 512
        self._path.rename(self._place)
        self._published = True
        folder = os.open(self._place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return taken

    def withdraw(self) -> None:
        """Removes the file, put in place or not: the index didn't take it."""
        with contextlib.suppress(FileNotFoundError):
            (self._place if self._published else self._path).unlink()

    def close(self) -> None:
        """Ends the writing. Closing twice is fine."""
        if self.descriptor >= 0:
            if not self._published:
                self.withdraw()
            os.close(self.descriptor)
            self.descriptor = -1


def is_abandoned(path: Path) -> bool:
    """Whether the writer of a file in the partial folder is gone.

    Where files can't be locked, one not written to for an hour counts as abandoned.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:  # a link or the like: none of our writers makes one
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_SECONDS
    finally:
        os.close(descriptor)
    return True


class ChunkDisk(Disk):  # type: ignore[misc]
    """Keys: 64 hex digits. Values: bytes, kept inline, and staged or open binary files.

    Within `defer`…`settle` removals wait for the transaction around them to be committed, so that
    no row ever speaks of a file that is gone.
    """

    def __init__(self, directory: str, min_file_size: int = 0, pickle_protocol: int = 0) -> None:
        super().__init__(directory, min_file_size=0, pickle_protocol=0)
        self.root = Path(directory)
        self._local = threading.local()

    def new_name(self, key: str) -> str:
        """A file name for a key, never used before."""
        return f"{self._checked(key)}.{secrets.token_hex(4)}.kv"

    def path_of(self, name: object) -> Path:
        """The path of a file the index names. Raises as `checked_name`."""
        return self.root / self.checked_name(name)

    def checked_name(self, name: object) -> str:
        """The name of a file the index names.

        Raises IntegrityError for any name but our own kind: absolute, with "..", foreign.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise IntegrityError(
                f"the store's index names a file that cannot be one of its own: {name!r}",
                "run: cacheblend store verify --repair",
            )
        return name

    @staticmethod
    def _checked(key: object) -> str:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"a key is 64 hex digits, not {key!r}")
        return key

    # What diskcache calls. Signatures are its own.

    def put(self, key: object) -> tuple[str, bool]:
        return self._checked(key), True

    def get(self, key: object, raw: object) -> str:
        if not raw or not isinstance(key, str) or not _KEY.fullmatch(key):
            raise IntegrityError(
                "the store's index has a key that is not one of its own",
                "run: cacheblend store verify --repair",
            )
        return key

    def store(
        self, value: object, read: bool, key: object = UNKNOWN
    ) -> tuple[int, int, str | None, bytes | None]:
        if isinstance(value, StagedFile):
            published = getattr(self._local, "published", None)
            if published is not None:
                published.append(value)
            return value.publish(), MODE_BINARY, value.name, None
        if read:
            return self._store_file(value, self._checked(key))  # type: ignore[arg-type]
        if isinstance(value, bytes):
            return 0, MODE_RAW, None, value
        raise TypeError(f"the store keeps bytes and files, not {type(value).__name__}")

    def _store_file(self, value: BinaryIO, key: str) -> tuple[int, int, str, None]:
        staged = StagedFile(self.root, self.new_name(key), 0)
        try:
            with open(staged.descriptor, "wb", closefd=False) as file:
                while piece := value.read(2**20):
                    file.write(piece)
            return self.store(staged, True, key)  # type: ignore[return-value]
        finally:
            staged.close()

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> Any:
        if mode == MODE_RAW and filename is None and isinstance(value, bytes):
            return value
        if mode == MODE_BINARY and value is None:
            path = self.path_of(filename)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise IntegrityError(f"{path} is not a regular file", "remove it")
            file = open(descriptor, "rb")  # noqa: PTH123, SIM115
            if read:
                return file
            with file:
                return file.read()
        raise IntegrityError(
            f"the store's index has a row of a kind it never writes (mode {mode!r}); "
            "it was not loaded",
            "run: cacheblend store verify --repair",
        )

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> tuple[str, str]:
        name = self.new_name(self._checked(key))
        return name, str(self.root / name)

    def remove(self, file_path: object) -> None:
        waiting = getattr(self._local, "removals", None)
        if waiting is not None:
            waiting.append(file_path)
            return
        with contextlib.suppress(OSError, IntegrityError):
            self.path_of(file_path).unlink()

    # Files in step with transactions.

    def defer(self) -> None:
        """From now on this thread's removals wait."""
        self._local.removals = []
        self._local.published = []

    def settle(self, committed: bool, is_named: Callable[[str], bool]) -> None:
        """Does the removals that waited, or, where the transaction failed, forgets them and takes
        back the files that were put in place in it.

        is_named: whether the index speaks of a file. It has the last word: an interrupt that came
        while the commit was on its way is raised after it went through.
        """
        removals, published = self._local.removals, self._local.published
        self._local.removals = self._local.published = None
        if committed:
            for name in removals:
                self.remove(name)
        else:
            for staged in published:
                if not is_named(staged.name):
                    staged.withdraw()
