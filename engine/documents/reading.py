"""Files to documents, one at a time.

A run over many files goes on whatever one of them is: what cannot be read comes back as
`Unreadable`, what is left out on purpose as `Skipped`.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from engine.documents.content import Content, Unconvertible
from engine.documents.decoding import HEAD_BYTES, is_binary
from engine.documents.document import Document, Found, FoundFile, Skipped, Unreadable
from engine.documents.formats import convert
from engine.documents.kinds import (
    ARCHIVE,
    BINARY_KINDS,
    CONVERTED_KINDS,
    Foreign,
    binary_kind,
    kind_by_name,
    ole_kind,
    text_kind,
    zip_kind,
)
from engine.documents.names import reason_of, suffix_of

MAX_BYTES = 256 * 2**20
"""A larger file is `Unreadable`: documents are held in memory whole."""

# What no document's text holds, one character for another: marks stay where they are.
_UNFIT_TEXT = re.compile("[\0\r\ud800-\udfff]")
_UNFIT = {0: "\ufffd", 0xD: "\n", **dict.fromkeys(range(0xD800, 0xE000), "\ufffd")}

_AT_ONCE = 2**20
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
    read = _read(file, stdin, light=False)
    assert read is not None
    return read


def read_light(file: FoundFile) -> Document | Unreadable | Skipped | None:
    """As `read_document`; None for a file that is to be converted, one of `CONVERTED_KINDS`."""
    return _read(file, None, light=True)


def _read(
    file: FoundFile, stdin: BinaryIO | None, *, light: bool
) -> Document | Unreadable | Skipped | None:
    facts = (-1, 0)
    try:
        if file.path is None:
            raw: bytes | Unreadable | Foreign = _read_stdin(file.source, stdin)
        else:
            # Asked first: what changes while it is read counts as changed.
            facts = _facts(file.source, file.path)
            raw = _read_file(file, file.path)
    except OSError as error:
        return Unreadable(file.source, reason_of(error))
    if isinstance(raw, Unreadable | Foreign):
        return _left_out(file, raw)
    try:
        found = _kind_of(Content(file.source, raw), file)
        if isinstance(found, Foreign):
            return _left_out(file, found)
        kind, content = found
        if light and kind in CONVERTED_KINDS:
            return None
        converted = convert(kind, content)
    except Unconvertible as error:
        return Unreadable(file.source, str(error))
    except Exception as error:  # a damaged file raises what it likes out of the libraries
        what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return Unreadable(file.source, f"could not be read, it may be damaged ({what})")
    text = (
        converted.text.translate(_UNFIT) if _UNFIT_TEXT.search(converted.text) else converted.text
    )
    notes = converted.notes
    if kind in CONVERTED_KINDS and not notes and not text.strip():
        notes = ("no text in it",)
    return Document(
        *(file.source, text, _digest(text), *facts, converted.kind or kind),
        *(converted.form, converted.marks, notes),
    )


def _digest(text: str) -> str:
    """Of its UTF-8, without having all of that in memory beside it."""
    hasher = blake3()
    for start in range(0, len(text), _AT_ONCE):
        hasher.update(text[start : start + _AT_ONCE].encode())
    return hasher.hexdigest()


def _kind_of(content: Content, file: FoundFile) -> tuple[str, Content] | Foreign:
    """What a file is, and what of it is read. Raises Unconvertible for a damaged one."""
    name, raw = content.name, content.raw
    kind = binary_kind(name, raw)
    if kind == "zip":
        kind = zip_kind(name, raw)
    elif kind == "ole":
        kind = ole_kind(raw)
    if isinstance(kind, Foreign):
        return kind
    if kind:
        return kind, content
    if file.binary and _is_utf8(raw):  # a stray NUL makes no film of it
        content = Content(name, raw.replace(b"\0", "\ufffd".encode()))
    elif is_binary(raw):
        wanted = kind_by_name(name)
        if wanted in BINARY_KINDS:
            raise Unconvertible(
                f"is no {wanted.upper()} file, whatever its name; it may be damaged"
            )
        return Foreign("binary")
    if suffix_of(name) == "svg" and not file.named:
        return Foreign("image")
    return text_kind(name, content.text), content


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _left_out(file: FoundFile, what: Unreadable | Foreign) -> Unreadable | Skipped:
    if isinstance(what, Unreadable):
        return what
    if what.is_document:  # one that should have been read, in a folder too
        return Unreadable(file.source, what.reason)
    return Unreadable(file.source, what.reason) if file.named else Skipped(file.source, what.what)


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


def _read_file(file: FoundFile, path: Path) -> bytes | Unreadable | Foreign:
    # Not blocking, and checked once open: what was a file may be a pipe or a link by now.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not file.named:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    no_file = _kind(path.stat().st_mode)
    if no_file:  # opening some devices has effects of its own
        return Unreadable(file.source, f"is {no_file}")
    with os.fdopen(os.open(path, flags), "rb") as opened:
        info = os.fstat(opened.fileno())
        no_file = _kind(info.st_mode)
        if no_file:
            return Unreadable(file.source, f"is {no_file}")
        head = opened.read(HEAD_BYTES)
        kind = binary_kind(file.source, head)
        if isinstance(kind, Foreign):
            return kind
        if kind is None and is_binary(head) and not file.binary:
            return head  # a film need not be read to its end to be told from text
        if info.st_size > MAX_BYTES:
            if kind == "zip" and kind_by_name(file.source) not in BINARY_KINDS:
                return ARCHIVE
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
