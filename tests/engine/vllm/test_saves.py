"""The queue of chunks to be stored."""

import pytest

from engine.prompt import Segment
from engine.vllm import saves
from engine.vllm.saves import SaveQueue


def chunk(number: int) -> Segment:
    return Segment("chunk", (number,) * 10, 0)


def test_prefixes_count_among_the_waiting_tokens_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MOST_TOKENS", 150)
    queue = SaveQueue()
    first, second = (1,) * 100, (2,) * 100
    assert queue.add(first, [chunk(1), chunk(2)]) == 2
    assert queue.add(second, [chunk(3)]) == 0, "with its prefix it is too much"
    assert queue.add(tuple([1] * 100), [chunk(3)]) == 1
    for _ in range(3):
        assert len(queue.take(busy=False)) == 1
    assert queue.add(second, [chunk(3)]) == 1, "the first prefix is gone with its chunks"
