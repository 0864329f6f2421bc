"""Prompts in one text: split at the separator's text, which is in no part of what comes out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import UsageError
from engine.prompt_text import PromptText

SEP = " # # "


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Be brief. # # one # # two # # Why?", ("Be brief.", ("one", "two"), "Why?")),
        (" # # one # # two # # Why?", ("", ("one", "two"), "Why?")),
        ("# # one # # Why?", ("", ("one",), "Why?")),  # stripped on its way
        ("Be brief. # # Why?", ("Be brief.", (), "Why?")),
        ("Why?", ("", (), "Why?")),
        ("?", ("", (), "?")),  # shorter than the separator
        ("# #", ("", (), "# #")),
        ("Be brief. # #  # # one # # \n # # Why?", ("Be brief.", ("one",), "Why?")),
        ("a # # # # b", ("a", (), "# # b")),  # the second one shares its blank with the first
        ("a # # \none\n # # b # # c", ("a", ("\none\n", "b"), "c")),  # chunks are kept as they are
        ("C # is a key # and so is D", ("", (), "C # is a key # and so is D")),
    ],
)
def test_parts(text: str, parts: tuple[str, tuple[str, ...], str]) -> None:
    assert PromptText.split(text, SEP) == PromptText(*parts)


@pytest.mark.parametrize("text", ["", "  \n", SEP, "Be brief. # # one # # ", "one # #", "# # "])
def test_without_a_question_it_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no question"):
        PromptText.split(text, SEP)


def test_other_separators() -> None:
    parts = PromptText.split("s\n\none\n\nq", "\n\n")
    assert parts == PromptText("s", ("one",), "q")
    assert PromptText.split("s<|x|>one<|x|>q", "<|x|>") == parts
    with pytest.raises(UsageError, match="empty"):
        PromptText.split("a", "")


@given(st.text(), st.text(min_size=1, max_size=4))
def test_no_part_holds_the_separator(text: str, separator: str) -> None:
    try:
        parts = PromptText.split(text, separator)
    except UsageError:
        return
    assert not any(separator in part for part in (parts.instructions, *parts.chunks))
    assert separator not in parts.question
