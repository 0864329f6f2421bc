"""Text of any kind keeps its cells, and never drives the terminal."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cbcli.inspect.cells import NEWLINE, Cells, cells_of
from tests.cbcli.inspect.support import table


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[a:b] for a, b in pairwise(bounds)]


def shown(text: str, *places: int, **options: bool) -> Cells:
    return cells_of(table(cut(text.encode(), list(places))), [], **options)


HOSTILE = st.lists(
    st.sampled_from(
        [
            *("\x1b[2J", "\x1b]8;;http://x\x07", "\x9b31m", "\0", "\t", "\r\n", "\n", "[/INST]"),
            *(
                "[bold]",
                "[/",
                "e\u0301",
                "\u0301",
                "👩‍👩‍👧",
                "❤\ufe0f",
                "🇳🇱",
                "👍🏽",
                "\u200d",
                "\u200b",
            ),
            *(
                "العربية",
                "\u202eabc",
                "東京",
                "한",
                "\u1112\u1161",
                "नि",
                "\ufeff",
                "\u00ad",
                "\ue000",
            ),
            *(
                "a" * 300,
                "\U000e0041",
                "\u2028",
                "word ",
                "\U0001fae8",
                "Z\u0300\u0301\u0302\u0303",
            ),
        ]
    ),
    max_size=8,
).map("".join)


@given(HOSTILE | st.text(max_size=20), st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_every_text_in_any_cut_keeps_its_cells(text: str, places: list[int], ascii: bool) -> None:
    tokens = cut(text.encode("utf-8", "replace"), places)
    cells = cells_of(table(tokens), [], ascii=ascii)
    for group, width in zip(cells.shown, cells.widths, strict=True):
        assert cell_len(group) == width > 0
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Cn", "Co") for c in group)
        assert not ascii or group.isascii()
    assert cell_len("".join(cells.shown)) == cells.widths.sum()  # nothing joins its neighbour
    assert (np.diff(cells.first) >= 0).all()
    assert (np.diff(cells.last) >= 0).all()
    for token in range(len(tokens)):
        start, end = cells.of_token(token)
        assert start < end
        assert all(cells.first[at] <= token <= cells.last[at] for at in range(start, end))


def test_tokens_that_are_parts_of_one_character_share_its_cells() -> None:
    cells = cells_of(table([b"a\xe6", b"\x9d", b"\xb1b"]), [])
    assert cells.shown == ["a", "東", "b"]
    assert cells.widths.tolist() == [1, 2, 1]
    assert [cells.of_token(token) for token in range(3)] == [(0, 2), (1, 2), (1, 3)]


def test_a_mark_in_a_token_of_its_own_stays_on_its_letter() -> None:
    cells = cells_of(table([b"e", "\u0301".encode(), b"x"]), [])
    assert cells.shown == ["e\u0301", "x"]
    assert (cells.first.tolist(), cells.last.tolist()) == ([0, 2], [1, 2])


def test_no_group_reaches_over_a_cut() -> None:
    tokens = table([b"e", "\u0301".encode()])
    assert cells_of(tokens, [1]).shown == ["e", "◌\u0301"]


def test_a_token_without_bytes_has_a_sign() -> None:
    cells = cells_of(table([b"", b"a", b"", b"", b"b", b""]), [])
    assert cells.shown == ["∅", "a", "∅", "∅", "b", "∅"]
    assert cells.first.tolist() == cells.last.tolist() == list(range(6))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("\x1b[31m", ["␛", "[", "3", "1", "m"]),
        ("\0\t\x07", ["␀", "⇥ ", "␇"]),
        ("\x9b", ["\\x9b"]),
        ("a\u200db", ["a", "·", "b"]),
        ("👍🏽", ["👍", "·"]),
        ("🇳🇱", ["Ｎ", "Ｌ"]),
        ("❤\ufe0f", ["❤", "·"]),
        ("\u202e", ["\\u202e"]),
        ("[/INST]", list("[/INST]")),
        ("सि", None),
    ],
)
def test_what_could_do_harm_is_shown(text: str, groups: list[str] | None) -> None:
    cells = shown(text)
    assert groups is None or cells.shown == groups


def test_bytes_that_are_no_text_are_spelt_out() -> None:
    assert cells_of(table([b"\xff\xc3", b"("]), []).shown == ["\\xff", "\\xc3", "("]


def test_line_ends_end_lines() -> None:
    cells = shown("a\nb")
    assert cells.shown == ["a", "↵", "b"]
    assert cells.kinds.tolist()[1] == NEWLINE


def test_ascii_spells_everything_else_out() -> None:
    assert shown("é東\x1b", ascii=True).shown == ["\\xe9", "\\u6771", "\\x1b"]
