"""JSON Lines: a record a line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from engine.documents.content import Content, Converted
from engine.documents.formats.json_values import (
    OVERLONG,
    Overlong,
    Pairs,
    parse,
    records,
    room_of,
)

_LOOKED_AT = 20


def read(content: Content) -> Converted:
    """Lines that are no JSON stay as they are, and are told."""
    broken: list[int] = []

    def values() -> Iterator[tuple[int, Any]]:
        for number, line in numbered(content.text):
            try:
                yield number, parse(line)
            except ValueError:
                broken.append(number)
                yield number, line

    notes = content.decoded.notes
    try:
        found = records(values(), "line", room_of(content.text))
    except Overlong:
        return Converted(content.text, notes=(*notes, f"{OVERLONG}: read as text"))
    if broken:
        first = f"line {broken[0]}"
        what = f"{first} is" if len(broken) == 1 else f"{len(broken)} lines, first {first}, are"
        notes = (*notes, f"{what} not valid JSON: kept as text")
    return Converted(found.text, found.form, found.marks, notes, kind="jsonl")


def fits(text: str) -> bool:
    """Whether a text that is no JSON as a whole is JSON line by line."""
    first = [line for _, line in islice(numbered(text), _LOOKED_AT)]
    if len(first) < 2:
        return False
    try:
        return all(isinstance(parse(line), Pairs | list) for line in first)
    except ValueError:
        return False


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank; only LF ends a line, as other breaks may be inside a string."""
    start, number = 0, 1
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].strip()
        if line:
            yield number, line
        start, number = end + 1, number + 1
