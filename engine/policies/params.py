"""Parameters of a policy, as they are written in its spec: `NAME:key=value,key=value`."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TypeVar

from cache_store.errors import UsageError

T = TypeVar("T", bound=str)
_SHOWN = 60  # characters of what a user wrote that a message repeats


def parse_spec(spec: str) -> tuple[str, Mapping[str, str]]:
    """Name and parameters of a policy. Raises UsageError for a part that is no key=value."""
    name, colon, rest = spec.strip().partition(":")
    params: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in params:
            raise UsageError(
                f"policy {brief(spec)!r}: {brief(part.strip())!r} is no parameter",
                "write each once, as key=value: question:layers=8-20,heads=max",
            )
        params[key] = value
    return name.strip(), params


def only(name: str, params: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Raises UsageError for a parameter that the policy doesn't have."""
    for key in params:
        if key not in known:
            raise UsageError(
                f"policy {name} has no parameter {brief(key)!r}",
                "it has " + ", ".join(known) if known else f"write just {name}",
            )


def one_of(name: str, key: str, value: str, choices: tuple[T, ...]) -> T:
    """The choice that `value` names. Raises UsageError."""
    found = next((choice for choice in choices if choice == value), None)
    if found is None:
        raise UsageError(f"policy {name}: {key}={value}", "use one of " + ", ".join(choices))
    return found


def whole(name: str, key: str, value: str) -> int:
    """A number of tokens or a layer. Raises UsageError unless it is 0, 1, 2, …"""
    if not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise UsageError(f"policy {name}: {key}={brief(value)} is not a whole number")
    return int(value)


def layer_span(name: str, value: str) -> tuple[int, int]:
    """First and last layer of `8-20`, or of `8`. Raises UsageError."""
    first, dash, last = value.partition("-")
    span = whole(name, "layers", first), whole(name, "layers", last if dash else first)
    if span[1] < span[0]:
        raise UsageError(f"policy {name}: layers={value}", "write the lower one first: 8-20")
    return span


def positive(name: str, key: str, value: str) -> Decimal:
    """A number from a millionth to a million, exact. Raises UsageError."""
    try:
        number = Decimal(value)
    except InvalidOperation:
        number = Decimal(0)
    if not (number.is_finite() and Decimal("1e-6") <= number <= 10**6):
        raise UsageError(
            f"policy {name}: {key}={brief(value)} is not a number above 0",
            "write a share, such as 0.7 or 3",
        )
    return number


def brief(text: str) -> str:
    """Text of a spec as a message shows it."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
