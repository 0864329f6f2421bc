"""Kinds of setting: each reads a value from TOML, the environment or a flag.

What a kind is, and the simplest ones, are in `engine.kinds`. What one takes from a file is said
once more in `cbcli.settings_schema`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from cache_store.collection_name import NAME_RULE, is_collection_name
from cache_store.tiers.addresses import EXPECTED, read_address
from engine.kinds import Kind as Kind
from engine.kinds import choice as choice
from engine.kinds import day as day
from engine.kinds import finite, parse_size, unescaped
from engine.kinds import flag as flag
from engine.kinds import text as text

T = TypeVar("T")

_DEVICE = re.compile(r"auto|cpu|cuda|cuda:[0-9]{1,3}|mps")
_LAYER_0 = (
    "layers from 1 on: layer 0's keys and values depend on the token alone, so that their "
    "deviation there is only rounding noise"
)


def some_text(value: object) -> str:
    if not text(value):
        raise ValueError("text, at least one character")
    return text(value)


def folder(value: object) -> Path:
    """A path; the loader makes a relative one absolute."""
    if isinstance(value, Path) or (isinstance(value, str) and value):
        return _expanded(Path(value))
    raise ValueError("a folder")


def folders(value: object) -> tuple[Path, ...]:
    """A list of folders; a bare one is one of them."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_each(item, folder, "a list of folders") for item in items)


def model(value: object) -> str:
    """A model's name, or its folder, known by a leading dot, tilde or slash."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a model's name or folder")
    return str(_expanded(Path(value))) if value.startswith("~") else value


def pager(value: object) -> bool | str:
    """Whether there is one, or its command."""
    if isinstance(value, str) and value.strip().lower() in ("", "none"):
        return False
    try:
        return flag(value)
    except ValueError:
        if isinstance(value, str):
            return value
        raise ValueError("true, false or the command of a pager") from None


@dataclass(frozen=True)
class whole:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int | None = None

    def __call__(self, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value):
            value = int(value)
        expected = f"a whole number {_range(self.low, self.high)}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(expected)
        if value < self.low or (self.high is not None and value > self.high):
            raise ValueError(expected)
        return value


@dataclass(frozen=True)
class number:
    """Numbers from `low` to `high`; with `above`, `low` itself is not among them."""

    low: int
    high: int
    _: KW_ONLY
    above: bool = False

    def __call__(self, value: object) -> float:
        expected = (
            f"a number above {self.low} and up to {self.high}"
            if self.above
            else f"a number {_range(self.low, self.high)}"
        )
        exact = _decimal(value, expected)
        if not self.low <= exact <= self.high or (self.above and exact == self.low):
            raise ValueError(expected)
        return float(exact)


def device(value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError("auto, cpu, cuda, cuda:N or mps")
    return value


def devices(value: object) -> tuple[str, ...]:
    """Devices to share work between; a device may be there more than once."""
    expected = "devices such as cuda:0,cuda:1"
    if value in ([], ()):
        return ()
    items = [i.strip() if isinstance(i, str) else i for i in _items(value, expected)]
    found = tuple(_each(item, device, expected) for item in items)
    if "auto" in found:
        raise ValueError(expected)
    return found


def size(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    read = parse_size(value) if isinstance(value, str) else 0
    if read <= 0:
        raise ValueError("a size such as 20GB, 500MiB or a number of bytes")
    return read


def amount(value: object) -> int:
    """A size that may be 0."""
    if value == 0 or (isinstance(value, str) and value.strip() == "0"):
        return 0
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f"{error}; 0 for none") from None


def remote(value: object) -> str | None:
    """The address of a remote store; None where it is "none"."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(EXPECTED)
    if value.strip().lower() == "none":
        return None
    read_address(value.strip())
    return value.strip()


RETRIEVERS = ("bm25", "embed", "hybrid")


_OWN = re.compile(r"\S.*:[^\W\d]\w*")


def retriever(value: object) -> str:
    """One of ours, or the user's own, as module:name or file.py:name."""
    if isinstance(value, str) and (value in RETRIEVERS or _OWN.fullmatch(value)):
        return value
    raise ValueError(f"{', '.join(RETRIEVERS)}, module:function or file.py:function")


AUTO: tuple[Decimal, ...] = ()
"""The ratio `auto`: the calibration's loading controller chooses it for each prompt."""


def ratios(value: object) -> tuple[Decimal, ...]:
    """One or several ratios from 0 to 1, exact, none greater than the one before it; or AUTO."""
    if value == "auto":
        return AUTO
    expected = (
        "auto, or numbers from 0 to 1, none greater than the one before it, such as 0.16 or "
        "0.3,0.16"
    )
    found = tuple(_decimal(item, expected) for item in _items(value, expected))
    if any(not 0 <= ratio <= 1 for ratio in found) or list(found) != sorted(found, reverse=True):
        raise ValueError(expected)
    return found


def share(value: object) -> Decimal:
    """A number from 0 to 1, exact."""
    expected = "a number from 0 to 1"
    exact = _decimal(value, expected)
    if not 0 <= exact <= 1:
        raise ValueError(expected)
    return exact


class policy:
    """A policy's name, with parameters behind a colon or without; those are checked where it is
    made."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or value.partition(":")[0].strip() not in self.names:
            raise ValueError(f"one of {', '.join(self.names)}")
        return value.strip()


def layers(value: object) -> tuple[int, ...]:
    """One or several layers from 1 on, in rising order."""
    expected = "layers in rising order, such as 1 or 1,8"
    found = tuple(_each(item, whole(0), expected) for item in _items(value, expected))
    if 0 in found:
        raise ValueError(_LAYER_0)
    if list(found) != sorted(set(found)):
        raise ValueError(expected)
    return found


def collections(value: object) -> tuple[str, ...]:
    """Names of collections; in one text, commas stand between them."""
    expected = f"names of collections, each of {NAME_RULE}"
    if value in ("", [], (), [""]):
        return ()
    items = [i.strip() if isinstance(i, str) else i for i in _items(value, expected)]
    if not all(isinstance(item, str) and is_collection_name(item) for item in items):
        raise ValueError(expected)
    return tuple(dict.fromkeys(map(str, items)))


def profile_name(value: object) -> str | None:
    """A profile's name; an empty one is none."""
    if value == "":
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", value):
        raise ValueError("a profile's name: letters, digits, - and _")
    return value


def globs(value: object) -> tuple[str, ...]:
    """A list of texts, as they are; a bare one is one of them."""
    items = [value] if isinstance(value, str) and value else value
    if not isinstance(items, list | tuple) or not all(isinstance(v, str) and v for v in items):
        raise ValueError("a list of globs, such as *.md")
    return tuple(items)


def names(value: object) -> tuple[str, ...]:
    """Names; in one text, commas stand between them."""
    expected = "names such as md,pdf"
    items = [] if value in ("", [], ()) else _items(value, expected)
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(expected)
    return tuple(dict.fromkeys(str(item).strip() for item in items))


def texts(value: object) -> tuple[str, ...]:
    """A list of texts; a bare string is one of them."""
    if isinstance(value, str):
        return (unescaped(value),) if value else ()
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
        raise ValueError("a list of texts")
    return tuple(value)


def _range(low: int, high: int | None) -> str:
    return f"from {low} to {high}" if high is not None else f"of {low} or more"


def _items(value: object, expected: str) -> list[object]:
    given = list(value) if isinstance(value, list | tuple) else [value]
    parts = [item.split(",") if isinstance(item, str) else [item] for item in given]
    if not parts:
        raise ValueError(expected)
    return [item for part in parts for item in part]


def _each(value: object, kind: Callable[[object], T], expected: str) -> T:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(expected) from None


def _decimal(value: object, expected: str) -> Decimal:
    exact = finite(value)
    if exact is None:
        raise ValueError(expected)
    return exact


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("a folder whose ~ names a home that exists") from None
