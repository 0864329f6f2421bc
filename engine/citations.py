"""Numbers of documents that an answer names in brackets: `[2]`, `[1, 3]`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_CODE = re.compile(r"```.*?(?:```|\Z)|(?<!`)(`+)(?!`)[^\n]+?(?<!`)\1(?!`)", re.DOTALL)
_BRACKETS = re.compile(r"\[\s*(\d{1,6}(?:\s*[,;]\s*\d{1,6})*)\s*\]", re.ASCII)


@dataclass(frozen=True)
class Mention:
    """A number in brackets at characters [start, end) of an answer, the brackets among them."""

    number: int
    start: int
    end: int


def mentions(answer: str) -> tuple[Mention, ...]:
    """All of an answer's, in order; one for each number of a bracket that holds several. In code,
    between backticks, brackets mean something else."""
    prose = _CODE.sub(lambda code: " " * len(code[0]), answer)
    return tuple(
        Mention(int(number), found.start(), found.end())
        for found in _BRACKETS.finditer(prose)
        for number in re.split(r"[,;]", found[1])
    )


def spans(found: Iterable[Mention], number: int) -> list[tuple[int, int]]:
    """Where a number is named."""
    return [(one.start, one.end) for one in found if one.number == number]
