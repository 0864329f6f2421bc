"""Reads one file made of bytes, as the tests of formats do."""

from __future__ import annotations

from pathlib import Path

from engine.documents import Document, FoundFile, Skipped, Unreadable, read_document


def read(
    folder: Path, name: str, raw: bytes | str, *, named: bool = False
) -> Document | Unreadable | Skipped:
    path = folder / name
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return read_document(FoundFile(path.as_posix(), path, named))


def document(folder: Path, name: str, raw: bytes | str) -> Document:
    found = read(folder, name, raw)
    assert isinstance(found, Document), found
    assert "\r" not in found.text
    found.text.encode()
    starts = [mark.start for mark in found.marks]
    assert starts == sorted(set(starts))
    assert not starts or starts[-1] < len(found.text)
    return found


def at_marks(found: Document) -> dict[tuple[str, int], str]:
    """The text of each page, row and the like."""
    ends = [mark.start for mark in found.marks[1:]] + [len(found.text)]
    return {
        (mark.unit, mark.number): found.text[mark.start : end].strip()
        for mark, end in zip(found.marks, ends, strict=True)
    }
