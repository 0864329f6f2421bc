"""The part of a text that says why it was found."""

from __future__ import annotations

import re
from collections.abc import Collection

from cbcli.text import one_line
from engine.retrieval.terms import terms

_WORD = re.compile(r"\w+")
_SEARCHED = 20_000  # characters of a text that are looked through
_BEFORE = 0.2  # share of the snippet in front of the first word that was asked for


def snippet(text: str, wanted: Collection[str], length: int) -> str:
    """About `length` characters of a text, on one line: where most of the wanted terms stand close
    together, the earliest such place; its beginning where there are none."""
    text = one_line(" ".join(text[:_SEARCHED].split()))
    if len(text) <= length:
        return text
    found = _places(text, frozenset(wanted))  # a question may have very many
    best, most = 0, 0
    reach = int(length * (1 - _BEFORE))
    for number, (at, _) in enumerate(found):
        close = {term for other, term in found[number : number + length] if other < at + reach}
        if len(close) > most:
            best, most = at, len(close)
    start = max(0, min(best - int(length * _BEFORE), len(text) - length))
    if start:  # not in the middle of a word, where there are words
        space = text.find(" ", start, best)
        start = space + 1 if space >= 0 else start
    return (
        ("…" if start else "")
        + text[start : start + length].rstrip()
        + ("…" if start + length < len(text) else "")
    )


def _places(text: str, wanted: Collection[str]) -> list[tuple[int, str]]:
    """Where which of the terms stand, from left to right."""
    places: list[tuple[int, str]] = []
    for word in _WORD.finditer(text):
        for term in set(terms(word[0])).intersection(wanted):
            inside = word[0].casefold().find(term)  # scripts without spaces are one long word
            places.append((word.start() + max(inside, 0), term))
    return sorted(places)
