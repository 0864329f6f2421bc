"""CSV and its like: one row a line, whole, whatever was quoted in it."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from engine.documents.content import Content, Converted
from engine.documents.document import Mark
from engine.documents.names import suffix_of

_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 200
_SAMPLE_CHARS = 256 * 1024
_ALIKE = 0.8
"""A table's share of rows that have as many cells as most."""
_LINES_IN_A_ROW = 200  # more: a quote that nobody closed
_SEP = re.compile(r"sep=(.)\n")
_BREAKS = re.compile(r"\s*[\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\s*")

_Rows = Iterator[tuple[int, list[str]]]


def read(content: Content) -> Converted:
    """Rows are numbered as a spreadsheet does, the header being row 1."""
    text, notes = content.text, content.decoded.notes
    told = _SEP.match(text)
    body = text[told.end() :] if told else text
    tab = "\t" if suffix_of(content.name) in ("tsv", "tab") else ""
    for quotes in (True, False):  # without: a quote is a character as any other
        delimiter = told[1] if told else _delimiter(body, tab, quotes)
        if not delimiter:
            continue
        try:
            table = _table(body, delimiter, quotes)
        except (csv.Error, ValueError):
            continue
        return Converted(table[0], "rows", table[1], notes)
    if body.strip():
        notes = (*notes, "no table with the same cells in each row: read as text")
    return Converted(text, notes=notes)


def _table(text: str, delimiter: str, quotes: bool) -> tuple[str, tuple[Mark, ...]]:
    """Raises ValueError where a row has no end."""
    out, marks = io.StringIO(), []
    for number, row in _rows(text, delimiter, quotes):
        if not any(cell.strip() for cell in row):
            continue
        cells = [_BREAKS.sub(" ", cell) for cell in row]
        marks.append(Mark(out.tell(), "row", number))
        out.write(delimiter.join(_quoted(cell, delimiter) if quotes else cell for cell in cells))
        out.write("\n")
    return out.getvalue(), tuple(marks)


def _quoted(cell: str, delimiter: str) -> str:
    if delimiter in cell or cell.startswith('"'):
        return '"' + cell.replace('"', '""') + '"'
    return cell


def _rows(text: str, delimiter: str, quotes: bool) -> _Rows:
    quoting: Literal[0, 3] = 0 if quotes else 3  # csv.QUOTE_MINIMAL, csv.QUOTE_NONE
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    before = 0
    for number, row in enumerate(reader, 1):
        if reader.line_num - before > _LINES_IN_A_ROW:
            raise ValueError("a row without end")
        before = reader.line_num
        yield number, row


def _delimiter(text: str, first: str, quotes: bool) -> str:
    """What parts the cells: that which gives rows of most alike lengths; empty where none does."""
    sample = text[:_SAMPLE_CHARS]
    if len(text) > len(sample):
        sample = sample[: sample.rfind("\n") + 1] or sample
    best, rank = "", (0.0, 0)
    for candidate in dict.fromkeys(first + _DELIMITERS):
        try:
            rows = [row for _, row in islice(_rows(sample, candidate, quotes), _SAMPLE_ROWS)]
        except (csv.Error, ValueError):
            continue
        lengths = Counter(len(row) for row in rows if any(cell.strip() for cell in row))
        if not lengths:
            continue
        cells, alike = lengths.most_common(1)[0]
        share = alike / lengths.total()
        if cells >= 2 and share >= _ALIKE and (share, cells) > rank:
            best, rank = candidate, (share, cells)
        if best and candidate == first:
            break
    return best
