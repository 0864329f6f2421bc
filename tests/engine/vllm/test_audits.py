"""Which blended requests are audited, and when."""

from pathlib import Path

import pytest

from cache_store.errors import CacheblendError
from cache_store.journal import Journal
from engine.audit import Audit, AuditLog
from engine.options import BlendOptions
from engine.prompt import PromptChunk, lay_out
from engine.sources import Source
from engine.vllm.audits import MOST, PATIENCE, AuditQueue
from engine.vllm.plan import RequestPlan


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(number: int) -> tuple[RequestPlan, tuple[Source, ...]]:
    prompt = lay_out([1], [PromptChunk((number, 2))], [3], [4])
    sources = tuple(Source(segment, "computed") for segment in prompt.segments)
    return RequestPlan(f"r{number}", prompt, BlendOptions()), sources


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    return AuditLog(Journal(tmp_path, read_only=False))


def test_one_in_so_many_is_audited(log: AuditLog) -> None:
    queue = AuditQueue(Audit(log, 3))
    for number in range(7):
        queue.offer(*request(number))
    taken = [plan for _ in range(9) for plan in queue.take(busy=False)]
    assert [plan.request.request_id for plan in taken] == ["r0", "r3", "r6"]
    assert taken[1].sources == request(3)[1]


def test_two_servers_count_together(log: AuditLog) -> None:
    one, other = AuditQueue(Audit(log, 2)), AuditQueue(Audit(log, 2))
    for number in range(4):
        (one if number % 2 else other).offer(*request(number))
    assert (len(one), len(other)) == (0, 2)


def test_none_is_audited_where_nobody_asked_for_it() -> None:
    queue = AuditQueue(None)
    queue.offer(*request(0))
    assert queue.take(busy=False) == ()


def test_waits_until_the_engine_is_idle_but_not_for_ever(log: AuditLog) -> None:
    clock = Clock()
    queue = AuditQueue(Audit(log, 1), clock=clock)
    queue.offer(*request(0))
    queue.offer(*request(1))
    assert queue.take(busy=True) == ()
    assert len(queue.take(busy=False)) == 1  # one a step
    clock.now = PATIENCE - 1
    assert queue.take(busy=True) == ()
    clock.now = PATIENCE
    assert [plan.request.request_id for plan in queue.take(busy=True)] == ["r1"]
    assert not queue


def test_an_engine_that_never_idles_by_itself_audits_at_its_next_step(log: AuditLog) -> None:
    queue = AuditQueue(Audit(log, 1), idles=False)
    queue.offer(*request(0))
    assert len(queue.take(busy=True)) == 1


def test_only_so_many_wait(log: AuditLog) -> None:
    queue = AuditQueue(Audit(log, 1))
    for number in range(MOST + 3):
        queue.offer(*request(number))
    assert len(queue) == MOST


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    queue = AuditQueue(Audit(AuditLog(Journal(tmp_path, read_only=True)), 1))
    with pytest.raises(CacheblendError):
        queue.offer(*request(0))
