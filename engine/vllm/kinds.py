"""Kinds of a connector's setting: each reads a value from JSON or from the environment.

A kind is a function from what was given to the setting's value. Where it can't be that, it raises
ValueError with what was expected, to be put after "expected".
"""

import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path

from cache_store.tiers.addresses import EXPECTED, read_address

Kind = Callable[[object], object]

_SIZE = re.compile(r" *([0-9]+(?:\.[0-9]+)?) *([kmgt]i?|)b? *", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def unescaped(value: str) -> str:
    r"""Text of a shell, in which `\n`, `\t` and `\\` mean what they mean to the command."""
    found = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: found[match[1]], value)


def some_text(value: object) -> str:
    if not text(value):
        raise ValueError("text, at least one character; null for none")
    return text(value)


def day(value: object) -> str:
    try:
        return date.fromisoformat(text(value)).isoformat()
    except ValueError:
        raise ValueError("a day, as YYYY-MM-DD") from None


def path(value: object) -> Path:
    if isinstance(value, Path) or (isinstance(value, str) and value and "\0" not in value):
        return Path(value).expanduser().absolute()
    raise ValueError("a path")


def flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


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
    found = _decimal(value)
    if found is None or not 0 < found <= 3600:
        raise ValueError("seconds, above 0 and up to 3600")
    return float(found)


def share(value: object) -> Decimal:
    found = _decimal(value)
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


def choice(*names: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return read


def size(value: object) -> int:
    """Bytes: a number, or text such as 20GB or 500MiB."""
    expected = "a size such as 20GB, 500MiB or a number of bytes"
    found = _SIZE.fullmatch(str(value)) if isinstance(value, str | int) else None
    if found is None or isinstance(value, bool):
        raise ValueError(expected)
    exact = Decimal(found[1]) * _UNITS[found[2].lower()]
    if exact != int(exact) or exact > 10**18:
        raise ValueError(expected)
    return int(exact)


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


def _decimal(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    try:
        found = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
