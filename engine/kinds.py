"""Kinds of setting that the command line and vLLM's connector read alike.

A kind is a function from what was given (text, or a value of TOML or JSON) to the setting's value.
Where it can't be that, it raises ValueError with what was expected, to be put after "expected".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal, InvalidOperation

Kind = Callable[[object], object]

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r" *([0-9]+(?:\.[0-9]+)?|\.[0-9]+) *([kmgt]i?|)(b?) *", re.IGNORECASE)
_MOST = 10**18  # bytes: sums of some of them still fit where 64 bits are kept


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def unescaped(value: str) -> str:
    r"""Text of a shell, in which `\n`, `\t` and `\\` mean what they mean in TOML."""
    return re.sub(r"\\([nt\\])", lambda found: {"n": "\n", "t": "\t", "\\": "\\"}[found[1]], value)


def flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")


class choice:
    """One of some names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise ValueError(f"one of {', '.join(self.names)}")
        return value


def day(value: object) -> str:
    """A day as YYYY-MM-DD; TOML's own dates are taken too."""
    if isinstance(value, date):
        return value.strftime("%Y-%m-%d")
    try:
        return date.fromisoformat(text(value)).isoformat()
    except ValueError:
        raise ValueError("a day as YYYY-MM-DD") from None


def finite(value: object) -> Decimal | None:
    """A number, exact; None for what is none, and for one that isn't finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        # A float is read as it is written: 0.1 means a tenth.
        found = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def parse_size(text: str) -> int:
    """Bytes in `text`: "20GB" and "20G" are decimal, "500MiB" is binary, "1000" is bytes.

    Raises ValueError, saying what is expected; also for more than a million terabytes.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("a size such as 20GB, 500MiB or a number of bytes")
    number, unit, _ = found.groups()
    size = Decimal(number) * (_DECIMAL | _BINARY)[unit.lower()]
    if size > _MOST:
        raise ValueError("a size of no more than 1000000TB")
    if size != int(size):
        raise ValueError("a size of whole bytes")
    return int(size)
