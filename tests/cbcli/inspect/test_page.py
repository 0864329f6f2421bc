"""Pages: every line has the width, every token its place, searching and brackets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbcli.inspect.heat import STEPS, heat_of, pool_mean
from cbcli.inspect.lines import fit, line, span, text_of, width_of, wrap
from cbcli.inspect.page import Marks, Page, find, head, lay_out
from cbcli.inspect.run import Run
from cbcli.inspect.theme import Look
from tests.cbcli.inspect.support import HARBOUR, example, make
from tests.cbcli.inspect.test_cells import HOSTILE, cut

PLAIN = Look()


def marks(run: Run, cursor: int | None = None) -> Marks:
    return Marks(np.zeros(run.count, dtype=np.int8), run.selected, cursor)


def all_text(page: Page) -> list[str]:
    return [text_of(page.line(row, marks(page.run))) for row in range(len(page.rows))]


@settings(max_examples=60, deadline=None)
@given(HOSTILE, st.lists(st.integers(0, 400), max_size=5), st.integers(1, 90), st.booleans())
def test_lines_have_the_width_and_tokens_their_lines(
    text: str, places: list[int], width: int, ascii: bool
) -> None:
    tokens = cut(b"x" + text.encode(), places)
    run = Run(make([("chunk", "a.md", "hit", "")], tokens=[tokens], deviations=False))
    page = lay_out(run, width, Look(ascii=ascii))
    for row in range(len(page.rows)):
        assert width_of(page.line(row, marks(run, 0))) == max(12, width)
    for token in range(run.count):
        at = page.row_of_token(token)
        assert at in page.rows_of_token(token)
        assert not page.rows[at].head
        found = page.token_at(at, page.column_of_token(token))
        assert found is not None  # the first of those that share the cells
        assert page.cells.of_token(found)[0] <= page.cells.of_token(token)[0]


def test_a_page_reads_as_the_prompt() -> None:
    run = Run(example())
    shown = all_text(lay_out(run, 60, PLAIN))
    assert shown[0].startswith("── beginning exact, 9 tokens ──")
    heads = [text for text in shown if text.startswith("── ")]
    assert [head.split()[1:3] for head in heads] == [
        ["beginning", "exact,"],
        ["1", "lamp.md"],
        ["2", "harbour.md"],
        ["3", "ropes.txt"],
        ["4", "log.md"],
        ["question", "computed,"],
    ]
    assert "miss, 38 tokens" in heads[3]
    body = "".join(text[2:].rstrip(" ") + " " for text in shown if not text.startswith("──"))
    words = " ".join(body.replace("↵", " ").split())
    assert words == " ".join(run.trace.tokens.text.decode().split())


def test_words_are_not_cut_where_there_is_a_space() -> None:
    tokens = [b"alpha ", b"beta ", b"gamma"]
    page = lay_out(Run(make([("chunk", "a", "hit", "")], tokens=[tokens])), 15, PLAIN)
    assert [text[2:].rstrip() for text in all_text(page)[1:]] == ["alpha beta", "gamma"]


def test_a_token_of_5000_characters_is_wrapped() -> None:
    run = Run(make([("chunk", "a", "hit", "")], tokens=[[b"a", b"w" * 5000, b"b"]]))
    page = lay_out(run, 80, PLAIN)
    assert len(page.rows_of_token(1)) == 65
    assert page.token_at(40, 10) == 1


def test_selected_tokens_stand_between_brackets_in_ascii() -> None:
    tokens = [b"one", b" two", b" three", b" four"]
    trace = make([("chunk", "a", "hit", "")], tokens=[tokens], ratio=0.5)
    run = Run(trace)
    run.__dict__["selected"] = np.array([False, True, True, False])
    shown = all_text(lay_out(run, 60, Look(ascii=True)))
    assert shown[1].rstrip() == "| one[ two three] four"
    assert all(text.isascii() for text in shown)


def test_roles_say_score_selection_cursor_and_matches() -> None:
    run = Run(make([("chunk", "a", "hit", "")], tokens=[[b"ab", b"cd", b"ef"]]))
    steps = np.array([0, 3, 7], dtype=np.int8)
    found = Marks(steps, np.array([False, True, False]), 2, np.array([True, False, False]))
    drawn = lay_out(run, 40, PLAIN).line(1, found)
    roles = {part.text: part.role for part in drawn}
    assert (roles["ab"], roles["cd"], roles["ef"]) == ("match", "h3 sel", "h7 cur")


def test_finding_is_of_text_over_tokens_whatever_its_case() -> None:
    run = Run(make([("chunk", "a", "hit", "")], tokens=[[b"Har", b"bour", b" x har", b"bour"]]))
    assert find(run, "harbour") == [(0, 2), (2, 4)]
    assert find(run, "") == find(run, "z") == []
    assert find(run, "[") == find(run, ".*") == []


@pytest.mark.parametrize("scale", ["log", "linear", "rank"])
def test_the_highest_has_the_last_step_and_what_is_unknown_none(scale: str) -> None:
    values = np.array([np.nan, 0, 1, 2, 4, 100, 50], dtype=np.float32)
    heat = heat_of(values, scale)
    assert heat.steps[5] == STEPS
    assert heat.steps[0] == heat.steps[1] == 0
    assert heat.high == 100
    assert (np.diff(heat.steps[1:6]) >= 0).all()


def test_nothing_scored_has_no_colours() -> None:
    for values in (np.full(3, np.nan, np.float32), np.zeros(3, np.float32)):
        assert not heat_of(values).steps.any()


def test_shares_are_brought_down_with_their_means() -> None:
    values = np.array([[1, 0, 1, 1], [0, 0, 1, 1]], dtype=np.float32)
    assert pool_mean(values, 2).tolist() == [[0.5, 1], [0, 1]]
    assert pool_mean(values, 2, 1).tolist() == [[0.25, 1]]


@given(HOSTILE, st.integers(1, 60))
def test_lines_fit_and_wrap_whatever_is_in_them(text: str, columns: int) -> None:
    assert width_of(fit(line(span(text)), columns)) == columns
    for part in wrap(text, max(columns, 2)):
        assert width_of(line(span(part))) <= max(columns, 2)


def test_a_long_name_leaves_room_for_what_is_said_of_it() -> None:
    run = Run(make([("chunk", "docs/" + "n" * 300 + ".md", "hit", HARBOUR)]))
    told = text_of(head(run, run.segments[0], 80, Look()))
    assert "nnn…" in told
    assert f"hit, {run.count} tokens" in told
    assert "recomputed" in told
