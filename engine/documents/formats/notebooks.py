"""Jupyter notebooks: cells of text, code in fences, what the code wrote, no images."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.documents.content import Content, Converted
from engine.documents.document import Mark
from engine.documents.formats import json_values

MAX_OUTPUT = 2000
"""Characters of a cell's output that are kept, from its beginning."""

_DATA_IMAGE = re.compile(r"\(data:[^)\s]{0,100};base64,[^)]*\)|(?<=src=[\"'])data:[^\"']*")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BACKTICKS = re.compile("`{3,}")


def read(content: Content) -> Converted:
    try:
        book = json.loads(content.text)
    except (ValueError, RecursionError):
        return json_values.read(content)
    cells = _cells(book)
    if cells is None:
        return json_values.read(content)
    language = _language(book)
    parts, marks, place, cut = [], [], 0, 0
    for number, cell in enumerate(cells, 1):
        text, shortened = _cell(cell, language)
        cut += shortened
        if text:
            part = f"{text}\n\n"
            marks.append(Mark(place, "cell", number))
            parts.append(part)
            place += len(part)
    notes = content.decoded.notes
    if cut:
        what = "1 cell's output is" if cut == 1 else f"{cut} cells' outputs are"
        notes = (*notes, f"{what} shortened to {MAX_OUTPUT} characters")
    return Converted("".join(parts)[:-1], "markdown", tuple(marks), notes, kind="notebook")


def _cells(book: Any) -> list[Any] | None:
    """None for what is no notebook."""
    if not isinstance(book, Mapping):
        return None
    sheets = book.get("worksheets")
    if isinstance(sheets, list):  # before format 4
        inner = [sheet.get("cells") for sheet in sheets if isinstance(sheet, Mapping)]
        return [cell for cells in inner if isinstance(cells, list) for cell in cells]
    cells = book.get("cells")
    return cells if isinstance(cells, list) else None


def _language(book: Mapping[str, Any]) -> str:
    about = book.get("metadata")
    for part, field in (("kernelspec", "language"), ("language_info", "name")):
        found = about.get(part) if isinstance(about, Mapping) else None
        name = found.get(field) if isinstance(found, Mapping) else None
        if isinstance(name, str) and re.fullmatch(r"[\w+#.-]{1,30}", name):
            return name.lower()
    return "python"


def _cell(cell: Any, language: str) -> tuple[str, bool]:
    """A cell's text, and whether its output was shortened."""
    if not isinstance(cell, Mapping):
        return "", False
    source = _joined(cell.get("source", cell.get("input"))).strip("\n")
    if cell.get("cell_type") != "code":
        level = cell.get("level")
        if cell.get("cell_type") == "heading" and isinstance(level, int):
            source = f"{'#' * max(1, min(level, 6))} {source}"
        return _DATA_IMAGE.sub("()", source), False
    outputs = cell.get("outputs")
    written = [_output(item) for item in outputs] if isinstance(outputs, list) else []
    output = _ESCAPES.sub("", "".join(written)).strip("\n")
    kept = output[:MAX_OUTPUT]
    parts = [fenced(source, language)] if source.strip() else []
    parts += [fenced(kept, "text")] if kept.strip() else []
    return "\n\n".join(parts), len(kept) < len(output)


def _output(item: Any) -> str:
    if not isinstance(item, Mapping):
        return ""
    if item.get("output_type") in ("error", "pyerr"):
        text = f"{_joined(item.get('ename'))}: {_joined(item.get('evalue'))}"
    elif "text" in item:
        text = _joined(item["text"])
    else:
        data = item.get("data")
        text = _joined(data.get("text/plain")) if isinstance(data, Mapping) else ""
        if text.startswith("<") and text.endswith(">") and len(text) < 200:
            text = ""  # <Figure size 640x480 with 1 Axes>: an image is shown there
    return text if text.endswith("\n") or not text else f"{text}\n"


def _joined(value: Any) -> str:
    """Text of a field, which may be a list of lines."""
    if isinstance(value, list):
        value = "".join(item for item in value if isinstance(item, str))
    return value.replace("\r\n", "\n") if isinstance(value, str) else ""


def fenced(text: str, language: str) -> str:
    """A code block; its fence is longer than any in the code."""
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
