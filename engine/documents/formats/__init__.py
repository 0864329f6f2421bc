"""One module a kind of document, each with `read(content: Content) -> Converted`.

To add a kind: write its module here, name it in `_READERS`, and say in `engine.documents.kinds`
how its files are told. A reader raises `Unconvertible` for what it can't read, keeps no state
between files, and imports heavy libraries inside the function that uses them.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from engine.documents.content import Content, Converted, Reader

_READERS = {
    "code": "code",
    "csv": "tables",
    "docx": "docx",
    "epub": "epub",
    "html": "html",
    "json": "json_values",
    "jsonl": "json_lines",
    "markdown": "markdown",
    "notebook": "notebooks",
    "pdf": "pdf",
    "text": "plain",
}


def convert(kind: str, content: Content) -> Converted:
    """The text of a file of this kind. Raises Unconvertible, and whatever else a damaged file can
    make of the libraries that read it."""
    module = import_module(f"engine.documents.formats.{_READERS[kind]}")
    return cast(Reader, module.read)(content)
