"""CSV and its like: one row a line, whole, whatever was quoted in it."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from engine.documents.content import Content, Converted
from engine.documents.marks import Marks
from engine.documents.names import suffix_of

_DELIMITERS = ",;\t|"
_SAMPLE_ROWS = 200
_SAMPLE_CHARS = 256 * 1024
_ALIKE = 0.8
"""A table's share of rows that have as many cells as most."""
_LINES_IN_A_ROW = 200  # more: a quote that nobody closed
_SEP = re.compile(r"sep=(.)\n")


def read(content: Content) -> Converted:
    """Rows stay as they are written, but for line breaks in their cells, which become spaces.
    They are numbered as a spreadsheet does, the header being row 1."""
    text, notes = content.text, content.decoded.notes
    told = _SEP.match(text)
    body = text[told.end() :] if told else text
    tab = "\t" if suffix_of(content.name) in ("tsv", "tab") else ""
    for quotes in (True, False):  # without: a quote is a character as any other
        delimiter = told[1] if told else _delimiter(body, tab, quotes)
        if not delimiter:
            continue
        try:
            table, marks = _table(body, delimiter, quotes)
        except ValueError:
            continue
        return Converted(table, "rows", marks, notes)
    if body.strip():
        notes = (*notes, "no table with the same cells in each row: read as text")
    return Converted(text, notes=notes)


def _table(text: str, delimiter: str, quotes: bool) -> tuple[str, Marks]:
    """Raises ValueError where a row has no end."""
    lines: list[str] = []

    def places() -> Iterator[tuple[int, int]]:
        place = 0
        for number, row in _rows(text, delimiter, quotes):
            if row.strip(f'{delimiter}" \t'):
                lines.append(row)
                yield place, number
                place += len(row) + 1

    marks = Marks("row", places())
    return "".join(f"{line}\n" for line in lines), marks


def _rows(text: str, delimiter: str, quotes: bool) -> Iterator[tuple[int, str]]:
    """Rows with their numbers; of those of several lines, the lines joined by spaces."""
    number, parts = 0, 0
    row = ""
    for line in _lines(text):
        row = f"{row} {line.strip()}" if parts else line
        parts += 1
        if quotes and '"' in row and _is_open(row, delimiter):
            if parts > _LINES_IN_A_ROW:
                raise ValueError("a row without end")
            continue
        number, parts = number + 1, 0
        yield number, row
    if parts:
        raise ValueError("a row without end")


def _is_open(row: str, delimiter: str) -> bool:
    """Whether a quote that begins a cell is not closed yet."""
    if row.count('"') % 2 == 0:
        return False
    try:
        next(csv.reader([row], delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _delimiter(text: str, first: str, quotes: bool) -> str:
    """What parts the cells: that which gives rows of most alike lengths; empty where none does."""
    sample = text[:_SAMPLE_CHARS]
    if len(text) > len(sample):
        sample = sample[: sample.rfind("\n") + 1] or sample
    best, rank = "", (0.0, 0)
    for candidate in dict.fromkeys(first + _DELIMITERS):
        try:
            lengths = _lengths(sample, candidate, quotes)
        except (csv.Error, ValueError):
            continue
        if not lengths:
            continue
        cells, alike = lengths.most_common(1)[0]
        share = alike / lengths.total()
        if cells >= 2 and share >= _ALIKE and (share, cells) > rank:
            best, rank = candidate, (share, cells)
        if best and candidate == first:
            break
    return best


def _lengths(sample: str, delimiter: str, quotes: bool) -> Counter[int]:
    """How many of the first rows have how many cells."""
    lengths: Counter[int] = Counter()
    for _, row in islice(_rows(sample, delimiter, quotes), _SAMPLE_ROWS):
        if row.strip():
            plain = not quotes or '"' not in row
            cells = row.split(delimiter) if plain else next(csv.reader([row], delimiter=delimiter))
            lengths[len(cells)] += 1
    return lengths
