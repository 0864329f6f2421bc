"""JSON as lines of `path: value`, which keep their meaning wherever they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from engine.documents.content import Content, Converted
from engine.documents.marks import Marks

_MAX_CHARS = 64 * 2**20


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
    if isinstance(value, list) and not isinstance(value, Pairs) and any(map(_is_record, value)):
        return records(((number, item) for number, item in enumerate(value, 1)), "record", notes)
    return Converted("\n".join(lines(value)) + "\n", notes=notes)


def records(values: Iterator[tuple[int, Any]], unit: str, notes: tuple[str, ...] = ()) -> Converted:
    """Values with their numbers, each a paragraph."""
    parts: list[str] = []

    def places() -> Iterator[tuple[int, int]]:
        place = 0
        for number, value in values:
            parts.append("\n".join(lines(value)) + "\n\n")
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
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Pairs) and value:
            waiting += [(f"{path}.{key}" if path else key, item) for key, item in reversed(value)]
        elif isinstance(value, list) and value and any(isinstance(x, list) for x in value):
            waiting += [(f"{path}[{n}]", item) for n, item in reversed([*enumerate(value)])]
        elif isinstance(value, list) and value and not isinstance(value, Pairs):
            shown = ", ".join(scalar(item) for item in value)
            yield f"{path}: {shown}" if path else shown
        else:
            shown = scalar(value)
            yield f"{path}: {shown}" if path else shown


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
