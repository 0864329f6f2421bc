"""The output lines of a run in a file, where a later run can go on from."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from cache_store.errors import UsageError

EARLIER = ".earlier"  # appended to the file's name: what an earlier run wrote, while one goes on


@dataclass(frozen=True)
class Record:
    """A line of output as it stands in a file. number, digest: of its line of input."""

    number: int
    digest: str
    failed: bool
    raw: bytes


class OutputFile:
    """Takes output lines in the input's order; a context manager.

    Each line is one write at the end of the file. With `resume`, what an earlier run wrote is set
    aside first and taken from there line by line; whatever of it wasn't taken comes back when this
    run is interrupted. So a stop at any moment, even a crash, loses no answer.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """Raises UsageError for a file with other contents, or without `resume` with any, for one
        that another run is writing and for what is no file; OSError where it cannot be written."""
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file", "without --output lines go to stdout")
        self.path = path
        self.changed = 0
        self._earlier_path = path.with_name(path.name + EARLIER)
        self._last = 0  # number of the last line written
        self._finished = False
        self._earlier: Iterator[Record] = iter(())
        self._next: Record | None = None
        # Not truncated, whatever it is.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+b", 0)
        try:
            self._lock()
            if resume:
                self._set_aside()
                self._earlier = _records(self._earlier_path)
                self._next = next(self._earlier, None)
            else:
                self._require_empty()
        except BaseException:
            self._file.close()
            raise

    def kept(self, number: int, digest: str) -> str:
        """The line an earlier run wrote for this line of input, or "" where there is no good one.

        To be asked in the input's order. A line of input that has changed has none.
        """
        while self._next is not None and self._next.number < number:
            self._next = next(self._earlier, None)
        if self._next is None or self._next.number > number:
            return ""
        found, self._next = self._next, next(self._earlier, None)
        if found.digest != digest:
            self.changed += 1
            return ""
        return "" if found.failed else found.raw.decode("utf-8")

    def write(self, number: int, text: str) -> None:
        """Appends an output line, which ends in a newline."""
        _append(self._file, text.encode("utf-8"))
        self._last = number

    def finish(self) -> None:
        """All of the input was gone through: what is left of the earlier run belongs to nothing."""
        self._finished = True

    def close(self) -> None:
        try:
            if not self._finished:
                for record in _records(self._earlier_path):
                    if record.number > self._last:
                        _append(self._file, record.raw)
            self._earlier_path.unlink(missing_ok=True)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is being written by another run", "wait for it, or name another file"
            ) from None

    def _require_empty(self) -> None:
        if self._size() or self._earlier_path.exists():
            raise UsageError(
                f"{self.path} is there already", "go on from it with --resume, or remove it"
            )

    def _set_aside(self) -> None:
        """Moves what the file holds to the earlier run's, before any of that which a run that
        crashed while it went on had not come to yet."""
        for path in (self.path, self._earlier_path):
            _require_ours(path)
        if not self._size():
            return
        new = self._earlier_path.with_name(self._earlier_path.name + ".new")
        with new.open("wb") as file:
            last = 0
            for path in (self.path, self._earlier_path):
                for record in _records(path, after=last):
                    file.write(record.raw)
                    last = record.number
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._earlier_path)
        self._file.truncate(0)

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


def _append(file: BinaryIO, data: bytes) -> None:
    """One write, or more where the system takes less than all; all of the data or nothing."""
    before = os.fstat(file.fileno()).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except BaseException:  # no space left, or interrupted: no half line stays
        file.truncate(before)
        raise


def _records(path: Path, *, after: int = 0) -> Iterator[Record]:
    """The records of a file in rising order, those above `after`; nothing where there is no file.
    A line that was cut short is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            record = _record(raw)
            if record is not None and record.number > after:
                after = record.number
                yield record


def _record(raw: bytes) -> Record | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(value, dict) and raw.endswith(b"\n")):
        return None
    number, digest = value.get("line"), value.get("input")
    if not (isinstance(number, int) and isinstance(digest, str)):
        return None
    return Record(number, digest, "error" in value, raw)


def _require_ours(path: Path) -> None:
    """Raises UsageError for a file whose first line no run wrote, not even half of it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline()
    start = b'{"id": '
    torn = not first.endswith(b"\n") and (first.startswith(start) or start.startswith(first))
    if first and _record(first) is None and not (torn and not _is_json(first)):
        raise UsageError(
            f"{path} holds something else than the lines of an earlier run",
            "name another file with --output",
        )


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
