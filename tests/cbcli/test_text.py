"""Text from documents and models never drives the terminal it is printed on."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbcli.text import VisibleStream, one_line, shorten, visible, width

ANY = st.text(st.characters(exclude_categories=()), max_size=40)  # lone surrogates included


@given(ANY)
def test_nothing_that_controls_is_left(text: str) -> None:
    shown = visible(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    shown.encode()  # any encoder takes it
    assert visible(shown) == shown
    assert "\n" not in one_line(text)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_is_left_as_it_is(text: str) -> None:
    assert visible(text) == text
    assert width(text) == len(text)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[31mred", "␛[2J␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b]8;;http://evil\x1b\\link", "␛]8;;http://evil␛\\link"),
        ("\x9b31mred", "\\x9b31mred"),
        ("safe\roverwritten", "safe␍overwritten"),
        ("a\x08b\x7f", "a␈b␡"),
        ("admin\u202enimda", "admin\\u202enimda"),
        ("line\r\nnext\ttab", "line\nnext\ttab"),
        ("name\udcff", "name\\udcff"),
        ("עברית و العربية 東京 é", "עברית و العربية 東京 é"),
        ("[bold]markup[/bold] [/] :smile:", "[bold]markup[/bold] [/] :smile:"),
    ],
)
def test_hostile_text_is_shown_not_obeyed(hostile: str, shown: str) -> None:
    assert visible(hostile) == shown


@given(st.lists(st.sampled_from(["\r", "\n", "a", "\x1b[0m", "\r\n", "é"]), max_size=12))
def test_a_stream_shows_the_same_however_it_is_cut(pieces: list[str]) -> None:
    stream = VisibleStream()
    shown = "".join(stream.push(piece) for piece in pieces) + stream.finish()
    assert shown == visible("".join(pieces))


@given(st.text(max_size=30), st.integers(1, 20))
def test_shortened_text_fits(text: str, columns: int) -> None:
    text = one_line(text)
    short = shorten(text, columns)
    assert width(short) <= columns
    assert short == text or short.endswith("…")


def test_wide_and_combining_characters_are_measured() -> None:
    assert width("東京") == 4
    assert width("e\u0301") == 1
    assert shorten("東京都", 5) == "東京…"
