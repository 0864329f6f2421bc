"""A log in the store's folder: lines of JSON that many processes append to, and a counter."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.catalog import Claim
from cache_store.database import guarded
from cache_store.errors import CacheblendError, IntegrityError, UsageError

JOURNAL_FOLDER = "audit"
MAX_BYTES = 256 * 1024
"""Length at which a log is put aside, in the place of the one put aside before."""

_LOG, _EARLIER, _COUNT = "log.jsonl", "log.earlier.jsonl", "count"
_DIGITS = 20  # of the counter: of one length, so that one write changes all of it
_BLOCK = 4096
_LOCK_SECONDS = 5.0
_POLL_SECONDS = 0.005


def journal_files(store: Path) -> list[Path]:
    """The files of the journal of the store at `store`, whether they are there or not."""
    return [store / JOURNAL_FOLDER / name for name in (_LOG, _EARLIER, _COUNT)]


@dataclass(frozen=True)
class JournalLines:
    """What a log holds, oldest first. damaged: lines that are no JSON object, left out."""

    records: tuple[Mapping[str, Any], ...]
    damaged: int


class Journal:
    """An append-only log of JSON objects that keeps its last lines, at most twice `MAX_BYTES`.

    Threads and processes may share one: a line is appended whole or not at all, and one that a
    crash cut short spoils no other. Methods raise CacheblendError for a disk that fails and a log
    that another process keeps locked, IntegrityError where a link or something else is in its
    place.
    """

    def __init__(self, store: Path, *, read_only: bool, claim: Claim | None = None) -> None:
        """store: the store's folder. claim: a file grows within one of that many bytes on disk; may
        raise."""
        self.path = store / JOURNAL_FOLDER
        self._read_only = read_only
        self._claim = claim or (lambda size: contextlib.nullcontext())

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line. Raises UsageError where the store is open for reading only."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with guarded(self.path), self._room(len(line)), self._locked() as folder:
            if _size(folder, _LOG) + len(line) > MAX_BYTES:
                with contextlib.suppress(FileNotFoundError):
                    os.replace(_LOG, _EARLIER, src_dir_fd=folder, dst_dir_fd=folder)
            with _opened(folder, _LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
                _append(file, line)

    def next_number(self) -> int:
        """0, 1, 2, … over all processes, each number once."""
        with (
            guarded(self.path),
            self._room(_DIGITS),
            self._locked() as folder,
            _opened(folder, _COUNT, os.O_RDWR) as file,
        ):
            text = os.read(file, 2 * _DIGITS).strip()
            number = int(text) if text.isdigit() and len(text) < _DIGITS else 0  # damaged: anew
            os.pwrite(file, str(number + 1).rjust(_DIGITS).encode(), 0)
            os.ftruncate(file, _DIGITS)
            return number

    def read(self) -> JournalLines:
        """All that is there; nothing where nothing was written yet."""
        data = b""
        with (
            guarded(self.path),
            contextlib.suppress(FileNotFoundError),
            self._folder() as folder,
            contextlib.ExitStack() as stack,
        ):
            with contextlib.suppress(FileNotFoundError):
                lock = stack.enter_context(_opened(folder, _COUNT, os.O_RDONLY))
                self._wait(lock, fcntl.LOCK_SH)
            for name in (_EARLIER, _LOG):
                with contextlib.suppress(FileNotFoundError):
                    data += _tail(folder, name)
        found = [_record(line) for line in data.split(b"\n") if line.strip()]
        good = tuple(record for record in found if record is not None)
        return JournalLines(good, len(found) - len(good))

    def require_writable(self) -> None:
        """Raises UsageError where the store is open for reading only."""
        if self._read_only:
            raise UsageError(
                f"the store at {self.path.parent} is open for reading only",
                "make its folder writable, or choose another with --store",
            )

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Within, a log may grow by `size` bytes; begun before any lock of ours is held."""
        self.require_writable()
        with contextlib.ExitStack() as stack:
            if not self.path.exists():
                stack.enter_context(self._claim(3 * _BLOCK))  # the folder, the log and the counter
                self.path.mkdir(mode=0o700, exist_ok=True)
            else:
                length = 0
                with contextlib.suppress(FileNotFoundError):
                    length = (self.path / _LOG).lstat().st_size
                if not length or length % _BLOCK + size > _BLOCK:
                    stack.enter_context(self._claim(_BLOCK))
            yield

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        """A descriptor of the folder; through a link we'd write outside of the store."""
        if self.path.is_symlink():
            raise IntegrityError(f"{self.path} is a link", "remove it")
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The folder, while no other thread or process changes what is in it."""
        with self._folder() as folder, _opened(folder, _COUNT, os.O_RDWR | os.O_CREAT) as lock:
            self._wait(lock, fcntl.LOCK_EX)
            yield folder

    def _wait(self, lock: int, kind: int) -> None:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CacheblendError(
                        f"{self.path} is in use by another process",
                        "wait for it to finish, then try again",
                    ) from None
                time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _opened(folder: int, name: str, flags: int) -> Iterator[int]:
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise IntegrityError(f"{name} in {JOURNAL_FOLDER} is no file", "remove it")
        yield file
    finally:
        os.close(file)


def _size(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _append(file: int, line: bytes) -> None:
    """All of the line or nothing, on a line of its own even behind one that was cut short."""
    before = os.fstat(file).st_size
    if before and os.pread(file, 1, before - 1) != b"\n":
        line = b"\n" + line
    view = memoryview(line)
    try:
        while view:
            view = view[os.write(file, view) :]
    except BaseException:  # no space left, or interrupted
        os.ftruncate(file, before)
        raise


def _tail(folder: int, name: str) -> bytes:
    """The file's last `MAX_BYTES`, which is all of one that we wrote."""
    with _opened(folder, name, os.O_RDONLY) as file:
        start = max(0, os.fstat(file).st_size - MAX_BYTES)
        data = os.pread(file, MAX_BYTES, start)
        return data if data.endswith(b"\n") or not data else data + b"\n"


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
