"""Numbers for people: sizes, counts, durations, and sizes read back."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r" *([0-9]{1,6}(?:\.[0-9]{1,6})?) *(s|m|min|h|d|w) *", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds in `text`: "30d", "12h", "90m", "2w".

    Raises ValueError, saying what is expected.
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError("a time such as 30d, 12h, 90m or 2w")
    return float(found[1]) * _SECONDS[found[2].lower()]


def size_text(size: int) -> str:
    """`size` bytes with three digits and a decimal unit: 23040 is "23.0 kB"."""
    if abs(size) < 1000:
        return f"{size} B"
    value, units = size / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while abs(value) >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.1f} {unit}"


def count_text(count: int, unit: str = "") -> str:
    """`count` with thousands set apart: "12,345 tokens". The unit "bytes" gives a size."""
    if unit == "bytes":
        return size_text(count)
    if count == 1 and unit.endswith("s"):
        unit = unit[:-1]
    return f"{count:,} {unit}".rstrip()


def rate_text(rate: float, unit: str = "") -> str:
    """`rate` a second: "310 tokens/s", "4.2 files/s", "12.3 MB/s"."""
    if unit == "bytes":
        return f"{size_text(round(rate))}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.1f} {unit}/s"


def duration_text(seconds: float) -> str:
    """`seconds` as a person would say it: "340 ms", "12.3 s", "4 min 10 s", "2 h 5 min"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
