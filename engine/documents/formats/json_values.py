"""JSON as lines of `path: value`, which keep their meaning wherever they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from engine.documents.content import Content, Converted
from engine.documents.marks import Marks

_MAX_CHARS = 64 * 2**20
_LONGER = 16  # times the file, that the lines made of it may be
_MAX_MADE = 256 * 2**20
OVERLONG = "names are nested too long to repeat them for each value"


class Overlong(Exception):
    """Raised for values that would take far more text than the file."""


class Literal(str):
    """A number, true, false or null as it is written in the file."""


class Pairs(list[tuple[str, Any]]):
    """An object: all of its pairs, those of the same key too."""


def read(content: Content) -> Converted:
    """A list at the top is a list of records: each a paragraph, and numbered."""
    from engine.documents.formats import json_lines

    text, notes = content.text, content.decoded.notes
    if not text.strip():
        return Converted(text, notes=notes)
    if len(text) > _MAX_CHARS:
        return Converted(text, notes=(*notes, "JSON of this size is read as text"))
    try:
        value = parse(text)
    except ValueError as error:
        if json_lines.fits(text):
            return json_lines.read(content)
        return Converted(text, notes=(*notes, f"not valid JSON ({error}): read as text"))
    try:
        if isinstance(value, list) and not isinstance(value, Pairs) and any(map(_is_record, value)):
            return records(enumerate(value, 1), "record", room_of(text), notes)
        return Converted(joined(lines(value), room_of(text)), notes=notes)
    except Overlong:
        return Converted(text, notes=(*notes, f"{OVERLONG}: read as text"))


def room_of(text: str) -> int:
    """How long what is made of `text` may be."""
    return min(_LONGER * len(text) + 2**16, _MAX_MADE)


def records(
    values: Iterable[tuple[int, Any]], unit: str, room: int, notes: tuple[str, ...] = ()
) -> Converted:
    """Values with their numbers, each a paragraph. Raises Overlong where they take more than
    `room` characters."""
    parts: list[str] = []

    def places() -> Iterator[tuple[int, int]]:
        place = 0
        for number, value in values:
            parts.append(joined(lines(value), room - place) + "\n")
            yield place, number
            place += len(parts[-1])

    marks = Marks(unit, places())
    return Converted("".join(parts)[:-1], marks=marks, notes=notes)


def parse(text: str) -> Any:
    """A value: str, `Literal`, `Pairs` and list. Raises ValueError, and for what is nested too
    deep, too."""
    try:
        return json.loads(
            text,
            object_pairs_hook=Pairs,
            parse_int=Literal,
            parse_float=Literal,
            parse_constant=Literal,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def lines(value: Any) -> Iterator[str]:
    """`path: value` for each value that holds no others; without recursion."""
    waiting: list[tuple[str, str | int, Any]] = [("", "", value)]
    while waiting:
        # Put together only now: long names around many values would fill the memory.
        before, key, value = waiting.pop()
        path = f"{before}[{key}]" if isinstance(key, int) else f"{before}.{key}" if before else key
        if isinstance(value, Pairs) and value:
            waiting += [(path, name, item) for name, item in reversed(value)]
        elif isinstance(value, list) and value and any(isinstance(x, list) for x in value):
            waiting += [(path, n, item) for n, item in reversed([*enumerate(value)])]
        elif isinstance(value, list) and value and not isinstance(value, Pairs):
            shown = ", ".join(scalar(item) for item in value)
            yield f"{path}: {shown}" if path else shown
        else:
            shown = scalar(value)
            yield f"{path}: {shown}" if path else shown


def joined(values: Iterable[str], room: int) -> str:
    """Lines, each ended. Raises Overlong where they have more than `room` characters."""
    found: list[str] = []
    for line in values:
        room -= len(line) + 1
        if room < 0:
            raise Overlong
        found.append(f"{line}\n")
    return "".join(found)


def scalar(value: Any) -> str:
    """A value that holds no others. A text that reads like another value keeps its quotes."""
    if isinstance(value, Literal):
        return str(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Pairs):
        return "{}"
    if isinstance(value, list):
        return "[]"
    text: str = value.replace("\r\n", "\n")
    return json.dumps(text, ensure_ascii=False) if _is_ambiguous(text) else text


def _is_record(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and not isinstance(value, Literal))


def _is_ambiguous(text: str) -> bool:
    if not text or text != text.strip():
        return True
    if text in ("null", "true", "false", "{}", "[]", "NaN"):
        return True
    if text[0] in "-0123456789" and len(text) < 40:
        try:
            float(text)
        except ValueError:
            return False
        return True
    return False
