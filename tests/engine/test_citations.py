"""Numbers in brackets, as models write them."""

import pytest

from engine.citations import Mention, mentions, spans


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Six [2].", [(2, 4, 7)]),
        ("[1][12]", [(1, 0, 3), (12, 3, 7)]),
        ("both [1, 3]", [(1, 5, 11), (3, 5, 11)]),
        ("[ 1 ;2 ]", [(1, 0, 8), (2, 0, 8)]),
        ("[0007] is 7", [(7, 0, 6)]),
        ("x[1", []),
        ("[a] [1a] [] [1.2] [-1] (1) [[x]] [1 2]", []),
        ("[1234567]", []),
        ("[٣]", []),
        ("[[2]]", [(2, 1, 4)]),
        ("", []),
        ("`a[1]` is 6 [2]", [(2, 12, 15)]),
        ("``b`[1]`` and ` [1]", [(1, 16, 19)]),
        ("as in\n```\nx = a[1]\n```\n[3]", [(3, 23, 26)]),
        ("```\na[1]", []),
    ],
)
def test_mentions(answer: str, found: list[tuple[int, int, int]]) -> None:
    assert mentions(answer) == tuple(Mention(*one) for one in found)


def test_spans() -> None:
    answer = "six [1], or seven [2, 1]"
    assert spans(mentions(answer), 1) == [(4, 7), (18, 24)]
    assert spans(mentions(answer), 3) == []
