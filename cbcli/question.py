"""A question and names of chunks, as arguments or from standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cache_store.errors import NotFoundError, UsageError


def read_question(question: str) -> str:
    """The argument, or standard input where it is `-`; a byte that is no text is U+FFFD, as it is
    to the model. Raises UsageError where there is none."""
    from engine.tokenizer import replace_surrogates

    text = _stdin("no question was given") if question == "-" else question
    if not text.strip():
        raise UsageError("the question is empty", "give it as an argument, or on standard input")
    return replace_surrogates(text.strip())


def read_chunk_names(given: Sequence[str] | None, question: str) -> list[str]:
    """Ids of chunks, or their beginnings, in order. Each argument may hold several, with spaces or
    commas between; `-` are those on standard input.

    Raises UsageError where that is the question's, NotFoundError where it holds none.
    """
    names: list[str] = []
    for item in given or ():
        if item.strip() != "-":
            names += item.replace(",", " ").split() or [item]
            continue
        if question == "-":
            raise UsageError(
                "--chunk - and the question are both read from standard input",
                "give the question as an argument",
            )
        found = _stdin("--chunk -: no ids were given").replace(",", " ").split()
        if not found:
            raise NotFoundError(
                "--chunk -: standard input holds no chunk's id",
                "`cacheblend search -q QUESTION` prints ids",
            )
        names += found
    return names


def _stdin(missing: str) -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(missing, "give it as an argument, or on standard input")
    return sys.stdin.buffer.read().decode("utf-8", "replace")
