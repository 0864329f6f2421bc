"""Whether a blend asks the question, which decides how much stored KV is staged."""

from typing import Any

import pytest

from engine.options import BlendOptions
from engine.prompt import Segment
from engine.sources import Source, Status
from engine.stages import cached_tokens, question_layers


def sources(*statuses: Status) -> list[Source]:
    parts = [
        Source(Segment("chunk", tuple(range(100)), 100 * n), status)
        for n, status in enumerate(statuses)
    ]
    return [*parts, Source(Segment("suffix", (1, 2), 100 * len(parts)), "computed")]


@pytest.mark.parametrize(
    ("given", "statuses", "asks"),
    [
        ({}, ("hit", "hit"), True),
        ({"threshold": 0.5}, ("hit",), True),
        ({"policy": "value"}, ("hit", "hit"), False),
        ({"mode": "reuse"}, ("hit", "hit"), False),
        ({"ratio": 0}, ("hit", "hit"), False),
        ({"threshold": 0}, ("hit",), False),
        ({}, ("miss", "exact"), False),
        ({"ratio": 0.6}, ("exact", "exact", "hit"), False),  # every hit is recomputed anyhow
    ],
)
def test_the_question_is_asked_where_something_depends_on_it(
    given: dict[str, Any], statuses: tuple[Status, ...], asks: bool
) -> None:
    asked = question_layers(BlendOptions.of(**given), sources(*statuses), 8)
    assert bool(len(asked)) == asks


def test_exact_chunks_are_cached_ones() -> None:
    assert cached_tokens(sources("exact", "hit", "miss")) == 200
