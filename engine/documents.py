"""Files to documents: finding them, telling text from binary, decoding.

A run over many files goes on whatever one of them is: what cannot be read comes back as
`Unreadable`, what is left out on purpose as `Skipped`. Only a path the user typed that is not
there is an error.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from cache_store.errors import NotFoundError

STDIN = "-"
MAX_BYTES = 256 * 2**20
"""A larger file is `Unreadable`: documents are held in memory whole."""

_HEAD_BYTES = 8192
_SAMPLE_BYTES = 256 * 1024
_CONTROL_SHARE = 0.1
# Bytes below 0x20 that text does hold: backspace to carriage return, and escape.
_CONTROL_BYTES = bytes(set(range(0x20)) - set(range(0x08, 0x0E)) - {0x1B}) + b"\x7f"
_BOMS = [  # UTF-32 first: its mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]
_OLD_ENCODINGS = [
    *["cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"],
    *["iso8859_2", "iso8859_5", "iso8859_15", "koi8_r", "mac_roman", "tis_620"],
    *["cp932", "euc_jp", "iso2022_jp", "gb18030", "big5", "cp949"],
]
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_KINDS = [
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


@dataclass(frozen=True)
class Document:
    """Text as chunks are cut from it: decoded, without byte-order mark, lines ended by LF.

    source: the absolute path, or the name given to standard input.
    digest: blake3 hex of the text, so other bytes with the same text are the same document.
    size, mtime_ns: of the file; -1 and 0 where `source` leads to none.
    """

    source: str
    text: str
    digest: str
    size: int = -1
    mtime_ns: int = 0


@dataclass(frozen=True)
class Unreadable:
    """A file that should have been read and could not be; `reason` in words for the user."""

    source: str
    reason: str


@dataclass(frozen=True)
class Skipped:
    """A file inside a folder that is left out on purpose: binary, or a symbolic link."""

    source: str
    reason: str


@dataclass(frozen=True)
class FoundFile:
    """A file to read; `path` None: standard input; `named`: the user typed this very path."""

    source: str
    path: Path | None
    named: bool


Found = FoundFile | Unreadable | Skipped


def find_files(
    paths: Iterable[str | os.PathLike[str]], *, stdin_name: str = "stdin"
) -> list[Found]:
    """The files behind `paths`, each once and in the order typed, folders recursively and sorted.

    Hidden files and folders inside folders are passed over, symbolic links there are not
    followed; what the user typed is followed and tried whatever its name.

    Raises NotFoundError for a typed path that does not exist.
    """
    found: list[Found] = []
    seen: set[str] = set()
    for typed in paths:
        if os.fspath(typed) == STDIN:
            found.append(FoundFile(stdin_name, None, named=True))
            continue
        path = Path(typed)
        missing = NotFoundError(
            f"no file or folder '{_shown(os.fspath(typed))}'", "check the path's spelling"
        )
        if not os.fspath(typed):  # Path("") would be the current folder
            raise missing
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise missing from None
        except OSError as error:
            found.append(Unreadable(_source(path), _reason(error)))
            continue
        found += _walk(path) if stat.S_ISDIR(mode) else [FoundFile(_source(path), path, True)]
    return [item for item in found if _first_time(item, seen)]


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
        return Unreadable(file.source, _reason(error))
    if isinstance(raw, Unreadable):
        return raw
    if _is_binary(raw):
        if file.named:
            return Unreadable(file.source, "is binary, not text")
        return Skipped(file.source, "binary")
    text = _decode(raw)
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


def _walk(folder: Path) -> Iterator[Found]:
    """Everything under `folder`, sorted by name at each level, without recursion."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            mode = path.stat(follow_symlinks=path is folder).st_mode
            if stat.S_ISLNK(mode):
                yield _link(path)
            elif not stat.S_ISDIR(mode):
                yield FoundFile(_source(path), path, named=False)
            else:
                inside = sorted(path.iterdir(), key=lambda entry: entry.name, reverse=True)
                waiting += [entry for entry in inside if not entry.name.startswith(".")]
        except OSError as error:
            yield Unreadable(_source(path), _reason(error))


def _link(path: Path) -> Unreadable | Skipped:
    if path.exists():
        return Skipped(_source(path), "symbolic link")
    return Unreadable(_source(path), "is a broken symbolic link")


def _first_time(item: Found, seen: set[str]) -> bool:
    """Whether the file was not found before, under whatever name."""
    if not isinstance(item, FoundFile):
        key = f"{type(item).__name__} {item.source}"
    else:
        key = STDIN if item.path is None else os.path.realpath(item.path)
    known = key in seen
    seen.add(key)
    return not known


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
        head = opened.read(_HEAD_BYTES)
        if _is_binary(head):
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


def _is_binary(raw: bytes) -> bool:
    if any(raw.startswith(bom) for bom, _ in _BOMS):
        return False  # told when decoding
    if b"\0" in raw:
        return True
    sample = raw[:_SAMPLE_BYTES]
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    return controls > _CONTROL_SHARE * len(sample)


def _decode(raw: bytes) -> str | None:
    for bom, encoding in _BOMS:
        if raw.startswith(bom):
            return _decode_as(raw[len(bom) :], encoding)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        cut = error.reason == "unexpected end of data" and not raw[: error.start].isascii()
        if cut:  # UTF-8 to its end, and there the file stops inside a character
            return raw.decode(errors="replace")
    return _decode_as(raw, _guess(raw))


def _guess(raw: bytes) -> str:
    """The likeliest old encoding; empty when none fits."""
    from charset_normalizer import from_bytes

    sample = raw[:_SAMPLE_BYTES]
    if len(raw) > len(sample):  # a line's end is never inside a character
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    matches = from_bytes(sample, cp_isolation=_OLD_ENCODINGS)
    best = matches.best()
    if best is None:
        return ""
    # A few accents fit several code pages equally well; then it is the commonest one.
    rank = (best.chaos, -best.coherence)
    equal = [match for match in matches if (match.chaos, -match.coherence) == rank]
    common = any("cp1252" in match.could_be_from_charset for match in equal)
    return "cp1252" if common else best.encoding


def _decode_as(raw: bytes, encoding: str) -> str | None:
    try:
        text = raw.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None
    return None if "\0" in text else text


def _source(path: Path) -> str:
    """The absolute path, links in it kept, with forward slashes and printable whatever bytes the
    name has: the same file is the same document from whichever folder it is ingested."""
    if ".." in path.parts:  # behind a link `..` leads elsewhere than the name says
        return _shown(os.path.join(os.path.realpath(path.parent), path.name))  # noqa: PTH118
    return _shown(os.path.abspath(path))  # noqa: PTH100 - also tidies what Path.absolute() leaves


def _shown(path: str) -> str:
    slashes = path.replace(os.sep, "/")
    # An undecodable byte is a lone surrogate here, with the byte as its low eight bits.
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", slashes)


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link that leads nowhere"
    return (error.strerror or str(error)).lower()
