"""Whether a command printed what a page shows: words alike, measured figures of any size.

`…` stands for anything in a line, and alone in a line for any lines. Blanks count as one. Times,
sizes, rates, shares and numbers with a decimal point may be any; an id of hex digits too. Whole
numbers (documents, chunks, tokens) may differ by a quarter, but not small ones nor years.
"""

from __future__ import annotations

import re

_ANY = "…"
_NUMBER = r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
_UNITS = (
    ("ms", "s", "min", "h"),
    ("B", "kB", "MB", "GB", "TB"),
    ("B/s", "kB/s", "MB/s", "GB/s"),
    ("tokens/s",),
    ("GFLOP/s",),
    ("%",),
    ("x",),
)
_UNIT = "|".join(sorted((u for units in _UNITS for u in units), key=len, reverse=True))
_PART = re.compile(
    rf"(?P<any>{_ANY})|(?P<hex>\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{{6,64}}\b)"
    rf"|(?P<date>\d{{4}}-\d\d-\d\d \d\d:\d\d)"
    rf"|(?P<number>(?<![\w.]){_NUMBER})(?P<gap>\s?)(?P<unit>(?:{_UNIT})(?![\w/]))?"
    rf"|(?P<blank>\s+)"
)
_SLACK = 0.25


_PROGRESS = re.compile(r"^\w+: [\d,]+ of [\d,]+ \S+ \(\d+%\).*\n", re.MULTILINE)  # of slow commands


def difference(shown: str, printed: str) -> str:
    """What is wrong with `printed`, or "" where it is as shown."""
    wanted = [line.rstrip() for line in shown.strip("\n").splitlines()]
    got = [line.rstrip() for line in _PROGRESS.sub("", printed).strip("\n").splitlines()]
    return "" if _lines(wanted, got) else f"shown:\n{shown.strip()}\nprinted:\n{printed.strip()}"


def _lines(wanted: list[str], got: list[str]) -> bool:
    if not wanted:
        return not got
    if wanted[0].strip() == _ANY:
        return any(_lines(wanted[1:], got[skip:]) for skip in range(len(got) + 1))
    return bool(got) and alike(wanted[0], got[0]) and _lines(wanted[1:], got[1:])


def alike(shown: str, printed: str) -> bool:
    """Whether one printed line is like the one shown."""
    pattern, counts, end = "", [], 0
    for part in _PART.finditer(shown.strip()):
        pattern += re.escape(shown.strip()[end : part.start()])
        end = part.end()
        if part["any"]:
            pattern += ".*"
        elif part["hex"]:
            pattern += "[0-9a-f]{6,64}"
        elif part["date"]:
            pattern += r"\d{4}-\d\d-\d\d \d\d:\d\d"
        elif part["blank"]:
            pattern += r"\s+"
        elif part["unit"]:
            units = next(units for units in _UNITS if part["unit"] in units)
            pattern += rf"\s*{_NUMBER}\s?(?:{'|'.join(map(re.escape, units))})"
        elif "." in part["number"]:
            pattern += rf"\s*{_NUMBER}" + (r"\s*" if part["gap"] else "")
        else:
            pattern += rf"\s*({_NUMBER})" + (r"\s+" if part["gap"] else "")
            counts.append(part["number"])
    pattern += re.escape(shown.strip()[end:])
    found = re.fullmatch(pattern, printed.strip())
    return found is not None and all(map(_near, counts, found.groups()))


def _near(shown: str, printed: str) -> bool:
    first, second = (float(text.replace(",", "").replace("−", "-")) for text in (shown, printed))
    exact = abs(first) <= 20 or re.fullmatch("[12]\\d{3}", shown)
    return first == second or (not exact and abs(first - second) <= _SLACK * abs(first))
