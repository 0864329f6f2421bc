"""The part of a text that says why it was found."""

import pytest

from cbcli.snippet import snippet
from engine.retrieval.terms import question_terms

FILLER = "nothing of note was said on that day, nor on the next. " * 20
UNSPACED = "我们昨天没有说什么。" * 40


@pytest.mark.parametrize(
    ("text", "question", "shown"),
    [
        (FILLER + "The Café opens at six. " + FILLER, "When does the cafe open?", "Café opens"),
        (FILLER + "ropes are sold. " + FILLER + "A rope of tar. " + FILLER, "rope tar", "of tar"),
        (UNSPACED + "灯塔的灯在一八七一年点亮。" + UNSPACED, "灯塔", "灯塔的灯"),
        (FILLER + "call get_user_name() now " + FILLER, "getUserName", "get_user_name()"),
    ],
    ids=["accent", "together", "unspaced", "identifier"],
)
def test_it_stands_where_most_of_the_words_are(text: str, question: str, shown: str) -> None:
    part = snippet(text, question_terms(question), 80)
    assert shown in part
    assert part.startswith("…")
    assert part.endswith("…")
    assert len(part) <= 82


def test_without_a_word_it_is_the_beginning_and_a_short_text_is_whole() -> None:
    assert snippet(FILLER, ["zeppelin"], 20) == "nothing of note was…"
    assert snippet("  a\n short\ttext ", ["zeppelin"], 20) == "a short text"
    assert snippet("", [], 20) == ""


def test_the_end_of_a_text_is_shown_whole() -> None:
    assert snippet(FILLER + "At last the rope", ["rope"], 30).endswith("At last the rope")
