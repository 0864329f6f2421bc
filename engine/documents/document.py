"""What comes of files: documents, and what cannot be read or is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Mark:
    """The `number`-th page (or row, cell: the `unit`) of a file begins at character `start` of its
    text."""

    start: int
    unit: str
    number: int


@dataclass(frozen=True)
class Document:
    """Text as chunks are cut from it: decoded, without byte-order mark, lines ended by LF.

    source: the absolute path, or the name given to standard input.
    digest: blake3 hex of the text, so other bytes with the same text are the same document.
    size, mtime_ns: of the file; -1 and 0 where `source` leads to none.
    kind: what the file is, one of `engine.documents.kinds`, such as text, markdown, pdf, code.
    form: how its text is written, which decides where it is cut: text, markdown (what was
    converted from PDF, HTML and the like is, too), rows (a table, one row a line, the first line
    its header), or code:LANGUAGE.
    marks: where in the text pages, rows and the like begin, ascending; see `Mark`.
    notes: what a user should know of how it was read: "3 of 20 pages have no text".
    """

    source: str
    text: str
    digest: str
    size: int = -1
    mtime_ns: int = 0
    kind: str = "text"
    form: str = "text"
    marks: Sequence[Mark] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """A file that should have been read and could not be; `reason` in words for the user."""

    source: str
    reason: str


@dataclass(frozen=True)
class Skipped:
    """What is inside a folder and left out on purpose: ignored, hidden, an image, an archive, a
    symbolic link. `reason`: a word or a few, so that those of one kind can be counted. Of what is
    in a folder that is left out nothing more is said."""

    source: str
    reason: str


@dataclass(frozen=True)
class FoundFile:
    """A file to read; `path` None: standard input; `named`: the user typed this very path;
    `binary`: what looks binary is read too, where it can be read as text."""

    source: str
    path: Path | None
    named: bool
    binary: bool = False


Found = FoundFile | Unreadable | Skipped
