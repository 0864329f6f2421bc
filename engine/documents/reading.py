"""Files to documents, one at a time.

A run over many files goes on whatever one of them is: what cannot be read comes back as
`Unreadable`, what is left out on purpose as `Skipped`.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from engine.documents.decoding import HEAD_BYTES, decode, is_binary
from engine.documents.document import Document, Found, FoundFile, Skipped, Unreadable
from engine.documents.names import reason_of

MAX_BYTES = 256 * 2**20
"""A larger file is `Unreadable`: documents are held in memory whole."""

_KINDS = [
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


def read_documents(
    found: Iterable[Found], *, stdin: BinaryIO | None = None
) -> Iterator[Document | Unreadable | Skipped]:
    """Read what `find_files` found, one at a time and in order."""
    for item in found:
        yield read_document(item, stdin=stdin) if isinstance(item, FoundFile) else item


def read_document(
    file: FoundFile, *, stdin: BinaryIO | None = None
) -> Document | Unreadable | Skipped:
    """Read and decode one file; never raises for what the file is or holds, never blocks on a
    pipe or device. `stdin`: what "-" reads (default: the process's own)."""
    facts = (-1, 0)
    try:
        if file.path is None:
            raw = _read_stdin(file.source, stdin)
        else:
            facts = _facts(
                file.source, file.path
            )  # what changes while it is read counts as changed
            raw = _read_file(file, file.path)
    except OSError as error:
        return Unreadable(file.source, reason_of(error))
    if isinstance(raw, Unreadable):
        return raw
    if is_binary(raw):
        if file.named:
            return Unreadable(file.source, "is binary, not text")
        return Skipped(file.source, "binary")
    text = decode(raw)
    if text is None:
        return Unreadable(file.source, "is text in an encoding that could not be told")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(file.source, text, blake3(text.encode()).hexdigest(), *facts)


def _facts(source: str, path: Path) -> tuple[int, int]:
    """Size and time of a file; -1 and 0 where its source is not the name it can be found by."""
    status = path.stat()
    try:
        named = Path(source).stat()
    except OSError:  # a name that had to be changed to be printable
        return -1, 0
    if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
        return -1, 0
    return status.st_size, status.st_mtime_ns


def _read_stdin(source: str, stdin: BinaryIO | None) -> bytes | Unreadable:
    stream = stdin or (sys.stdin.buffer if sys.stdin is not None else None)
    if stream is None:
        return Unreadable(source, "is closed")
    raw = stream.read(MAX_BYTES + 1)
    return _too_large(source) if len(raw) > MAX_BYTES else raw


def _read_file(file: FoundFile, path: Path) -> bytes | Unreadable:
    # Not blocking, and checked once open: what was a file may be a pipe or a link by now.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not file.named:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    kind = _kind(path.stat().st_mode)
    if kind:  # opening some devices has effects of its own
        return Unreadable(file.source, f"is {kind}")
    with os.fdopen(os.open(path, flags), "rb") as opened:
        info = os.fstat(opened.fileno())
        kind = _kind(info.st_mode)
        if kind:
            return Unreadable(file.source, f"is {kind}")
        head = opened.read(HEAD_BYTES)
        if is_binary(head):
            return head  # a film need not be read to its end to be told from text
        if info.st_size > MAX_BYTES:
            return _too_large(file.source)
        raw = head + opened.read(MAX_BYTES + 1 - len(head))
    return _too_large(file.source) if len(raw) > MAX_BYTES else raw


def _kind(mode: int) -> str:
    """In words what something that is no regular file is; empty for a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((name for test, name in _KINDS if test(mode)), "no regular file")


def _too_large(source: str) -> Unreadable:
    return Unreadable(source, f"is larger than {MAX_BYTES // 2**20} MiB; split it")
