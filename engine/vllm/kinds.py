"""Kinds of a connector's setting: each reads a value from JSON or from the environment.

What a kind is, and those that the command line has too, are in `engine.kinds`.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from cache_store.tiers.addresses import EXPECTED, read_address
from engine.kinds import finite, parse_size, text


def some_text(value: object) -> str:
    if not text(value):
        raise ValueError("text, at least one character; null for none")
    return text(value)


def path(value: object) -> Path:
    if isinstance(value, Path) or (isinstance(value, str) and value and "\0" not in value):
        return Path(value).expanduser().absolute()
    raise ValueError("a path")


def whole(low: int, high: int = 2**63 - 1) -> Callable[[object], int]:
    """Whole numbers from `low` to `high`, both included."""
    expected = f"a whole number from {low} on" if high == 2**63 - 1 else f"{low} to {high}"

    def read(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(expected)
        return value

    return read


def seconds(value: object) -> float:
    found = finite(value)
    if found is None or not 0 < found <= 3600:
        raise ValueError("seconds, above 0 and up to 3600")
    return float(found)


def share(value: object) -> Decimal:
    found = finite(value)
    if found is None or not 0 <= found <= 1:
        raise ValueError("a number from 0 to 1")
    return found


def shares(value: object) -> tuple[Decimal, ...]:
    """One or several, from text with commas between them too."""
    try:
        return tuple(share(item) for item in _listed(value))
    except ValueError:
        raise ValueError("a number from 0 to 1, or one for each check layer") from None


def layers(value: object) -> tuple[int, ...]:
    """One or several layers, from text with commas between them too."""
    read = whole(0, 100_000)
    try:
        return tuple(read(item) for item in _listed(value))
    except ValueError:
        raise ValueError("a layer, or a list of layers") from None


def size(value: object) -> int:
    """Bytes: a number, or text such as 20GB or 500MiB."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a size such as 20GB, 500MiB or a number of bytes")
    return parse_size(str(value))


def remote(value: object) -> str | None:
    """A remote store's address; `none` for none."""
    if not isinstance(value, str) or not value:
        raise ValueError(EXPECTED)
    if value == "none":
        return None
    read_address(value)
    return value


def _listed(value: object) -> list[object]:
    if isinstance(value, str):
        value = value.split(",")
    found = list(value) if isinstance(value, list | tuple) else [value]
    if not found:
        raise ValueError
    return found
