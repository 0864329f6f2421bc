"""Markdown, code and notebooks; and what a file is, whatever its name says."""

import json
from pathlib import Path

import pytest

from engine.documents import Document, Skipped, Unreadable
from tests.engine.documents.reading import at_marks, document, read


def test_markdown_stays_as_it_is(tmp_path: Path) -> None:
    raw = "# Tides\n\n---\n\nThe tide turns.\n\n---\n"
    found = document(tmp_path, "a.md", raw)
    assert (found.kind, found.form, found.text) == ("markdown", "markdown", raw)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("---\ntitle: Tides\ntags: [sea]\n---\n\n# Hi\n", "title: Tides\ntags: [sea]\n\n# Hi\n"),
        ('+++\ntitle = "Tides"\n+++\nHi\n', 'title = "Tides"\n\nHi\n'),
        ("---\ntitle: Tides\n---\n", "title: Tides\n"),
        ("---\n\nno front matter\n\n---\nHi\n", "---\n\nno front matter\n\n---\nHi\n"),
        ("---\ntitle: never closed\n", "---\ntitle: never closed\n"),
    ],
)
def test_front_matter_loses_its_fences_alone(tmp_path: Path, raw: str, text: str) -> None:
    assert document(tmp_path, "a.md", raw).text == text


@pytest.mark.parametrize(
    ("name", "raw", "form"),
    [
        ("a.py", "def f():\n    return 1\n", "code:python"),
        ("a.TS", "let a = 1\n", "code:typescript"),
        ("Makefile", "all:\n\ttrue\n", "code:make"),
        ("CMakeLists.txt", "project(x)\n", "code:cmake"),
        ("run", "#!/usr/bin/env -S python3.11 -u\nprint()\n", "code:python"),
        ("run", "#!/bin/sh\ntrue\n", "code:shell"),
        ("a.py~", "x = 1\n", "code:python"),
        ("settings.yaml.bak", "a: 1\n", "code:yaml"),
    ],
)
def test_code_by_name_or_first_line(tmp_path: Path, name: str, raw: str, form: str) -> None:
    found = document(tmp_path, name, raw)
    assert (found.kind, found.form, found.text) == ("code", form, raw)
    lines = [line for line in raw.split("\n") if line]
    assert at_marks(found) == {("line", n): x.strip() for n, x in enumerate(lines, 1)}


CELLS = [
    {"cell_type": "markdown", "source": ["# Tides\n", "![x](data:image/png;base64,AAAA)"]},
    {
        "cell_type": "code",
        "source": "print('```')",
        "outputs": [
            {"output_type": "stream", "text": ["high\n", "\x1b[31mlow\x1b[0m\n"]},
            {"output_type": "display_data", "data": {"image/png": "iVBORw0K" * 99}},
            {"output_type": "error", "ename": "KeyError", "evalue": "'sea'"},
        ],
    },
    {"cell_type": "code", "source": "", "outputs": []},
    {"cell_type": "code", "source": "1", "outputs": [{"text": "long " * 1000}]},
]
BOOK = {
    "nbformat": 4,
    "metadata": {"kernelspec": {"language": "R"}},
    "cells": CELLS,
}


@pytest.mark.parametrize("name", ["a.ipynb", "a.json", "a.txt"])
def test_a_notebook(tmp_path: Path, name: str) -> None:
    found = document(tmp_path, name, json.dumps(BOOK))
    assert (found.kind, found.form) == ("notebook", "markdown")
    cells = at_marks(found)
    assert list(cells) == [("cell", 1), ("cell", 2), ("cell", 4)]
    assert cells["cell", 1] == "# Tides\n![x]()"
    assert cells["cell", 2] == (
        "````r\nprint('```')\n````\n\n```text\nhigh\nlow\nKeyError: 'sea'\n```"
    )
    assert "iVBOR" not in found.text
    assert len(cells["cell", 4]) < 2100
    assert found.notes == ("1 cell's output is shortened to 2000 characters",)


@pytest.mark.parametrize("cells", [1, [1, None, {"source": 3}], [{"cell_type": "code"}], None])
def test_strange_notebooks(tmp_path: Path, cells: object) -> None:
    raw = json.dumps({"nbformat": 4, "metadata": [], "cells": cells})
    assert isinstance(read(tmp_path, "a.ipynb", raw), Document)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "image"),
        (b"\x1f\x8b\x08\0\0", "archive"),
        (b"PK\x05\x06" + bytes(18), "archive"),
        (b"7z\xbc\xaf'\x1c\0", "archive"),
        (bytes(257) + b"ustar\x0000", "archive"),
        (b"ID3\x04\0\0", "audio"),
        (b"\0\0\0\x18ftypmp42\0", "video"),
        (b"{\\rtf1\\ansi Hello}", "RTF document"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "WordDocument".encode("utf-16-le"), "old Word"),
        (b"SQLite format 3\0", "database"),
        (b"\x7fELF\x02", "binary"),
    ],
)
@pytest.mark.parametrize("name", ["a", "a.txt", "a.md"])
def test_what_is_not_read_is_counted_by_what_it_is(
    tmp_path: Path, name: str, raw: bytes, what: str
) -> None:
    skipped = read(tmp_path, name, raw)
    assert isinstance(skipped, Skipped)
    assert skipped.reason.startswith(what)
    refused = read(tmp_path, name, raw, named=True)
    assert isinstance(refused, Unreadable)
    assert what in refused.reason


@pytest.mark.parametrize("name", ["a.pdf", "a.docx", "a.epub"])
def test_a_document_that_is_something_else(tmp_path: Path, name: str) -> None:
    assert document(tmp_path, name, "Only text.\n").kind == "text"
    assert document(tmp_path, name, "").text == ""
    damaged = read(tmp_path, name, b"\0\1\2\3" * 99)
    assert isinstance(damaged, Unreadable)
    assert "damaged" in damaged.reason


def test_a_picture_made_of_text_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    raw = "<svg><text>Harbour</text></svg>\n"
    assert read(tmp_path, "a.svg", raw) == Skipped((tmp_path / "a.svg").as_posix(), "image")
    assert isinstance(read(tmp_path, "a.svg", raw, named=True), Document)
