"""Workers in processes of their own: work is shared, and a worker that dies hangs nothing."""

import errno
import multiprocessing
import os
import signal
from collections.abc import Sequence
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from cache_store.errors import CacheblendError, NotFoundError
from engine.workers import Done, Lost, WorkerPool
from tests.engine.worker_tasks import Task, starting

pytestmark = pytest.mark.timeout(60)


def results(
    pool: WorkerPool[Task, str], tasks: Sequence[Task], first: int = 0
) -> dict[int, Done[str] | Lost]:
    """What becomes of all the tasks, by ticket."""
    for ticket, task in enumerate(tasks, first):
        pool.submit(ticket, task)
    found: dict[int, Done[str] | Lost] = {}
    while len(found) < len(tasks):
        finished, readable = pool.wait()
        assert finished
        assert not readable
        found |= {outcome.ticket: outcome for outcome in finished}
    return found


def text(outcome: Done[str] | Lost) -> str:
    assert isinstance(outcome, Done), outcome
    return outcome.result


def device(outcome: Done[str] | Lost) -> str:
    return text(outcome).split()[2]


def start_all(pool: WorkerPool[Task, str], count: int) -> set[str]:
    """Keeps the workers busy until all of them have done something; their process ids."""
    pids: dict[str, str] = {}
    ticket = -1000
    while len(pids) < count:
        for outcome in results(pool, [("wait", "0.1")] * count, ticket).values():
            pids[device(outcome)] = text(outcome).split()[-1]
        ticket += count
    return set(pids.values())


def make_pool(tmp_path: Path, *devices: str, said: list[str] | None = None):
    say = (lambda text: None) if said is None else said.append
    return WorkerPool[Task, str](devices, partial(starting, tmp_path), say)


def test_tasks_are_shared_and_workers_end_in_good_order(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one", "two") as pool:
        pids = start_all(pool, 2)
        found = results(pool, [("wait", "0.2")] * 8, first=1)
        assert {device(outcome) for outcome in found.values()} == {"one", "two"}
        assert results(pool, [("long", "x")])[0] == Done(0, "x" * 10**6)
        assert pool.wait() == ([], False)  # nothing is left to wait for
    assert {path.name for path in tmp_path.iterdir()} == pids
    assert multiprocessing.active_children() == []


def test_a_task_that_kills_is_tried_once_more_and_lost(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one", "two") as pool:
        found = results(pool, [("tell", "a"), ("die", ""), ("tell", "b"), ("tell", "c")])
        assert found[1] == Lost(1, "2 workers died of it, the last one was killed by SIGKILL")
        assert [text(found[n])[0] for n in (0, 2, 3)] == ["a", "b", "c"]
        # Both workers may be gone by now: there are new ones.
        assert text(results(pool, [("tell", "d")], first=9)[9]).startswith("d on")


def test_a_task_whose_worker_dies_goes_to_another_one(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one", "two") as pool:
        start_all(pool, 2)
        for first in range(0, 6, 2):
            found = results(pool, [("die on", "one"), ("die on", "one")], first)
            assert {device(outcome) for outcome in found.values()} == {"two"}


def test_one_worker_alone_gets_its_task_again(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one") as pool:
        found = results(pool, [("die once", str(tmp_path / "died")), ("tell", "b")])
        assert all(isinstance(outcome, Done) for outcome in found.values())


def test_a_bug_in_a_task_is_a_death_too(tmp_path: Path, capfd) -> None:
    with make_pool(tmp_path, "one") as pool:
        (outcome,) = results(pool, [("raise", "x")]).values()
    assert outcome == Lost(0, "2 workers died of it, the last one ended with exit code 1")
    assert "KeyError: 'x'" in capfd.readouterr().err


def test_a_device_that_is_not_there_is_its_own_error(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one", "absent") as pool:
        with pytest.raises(NotFoundError, match="no device absent") as caught:
            results(pool, [("wait", "5")] * 4)
        assert caught.value.hint == "use another"


def test_a_worker_that_dies_while_starting_is_told(tmp_path: Path) -> None:
    with (
        make_pool(tmp_path, "deadly") as pool,
        pytest.raises(CacheblendError, match="worker on deadly ended with exit code 3 before"),
    ):
        results(pool, [("tell", "a")])


def test_a_device_that_goes_away_leaves_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    gone = f"once:{tmp_path / 'started'}"
    with make_pool(tmp_path, gone, "two", said=said) as pool:
        start_all(pool, 2)
        found = results(pool, [("die on", gone)] * 2 + [("wait", "0.2")] * 8)
        assert {device(outcome) for outcome in found.values()} == {"two"}
        while not said:  # its restart may take longer than that
            results(pool, [("wait", "0.1")], first=100)
    assert said == [f"going on without {gone}: the device went away"]


def test_a_process_that_the_system_does_not_start_is_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: SpawnProcess) -> None:
        raise BlockingIOError(errno.EAGAIN, "too many processes")

    monkeypatch.setattr(SpawnProcess, "start", start)
    with pytest.raises(BlockingIOError), make_pool(tmp_path, "one") as pool:
        results(pool, [("tell", "a")])


def test_without_any_worker_it_ends(tmp_path: Path) -> None:
    gone = f"once:{tmp_path / 'started'}"
    with make_pool(tmp_path, gone) as pool, pytest.raises(NotFoundError, match="went away"):
        results(pool, [("die", ""), ("tell", "b")])


def test_interrupts_are_not_for_workers(tmp_path: Path) -> None:
    with make_pool(tmp_path, "one") as pool:
        (outcome,) = results(pool, [("sigint", "alive")]).values()
        assert text(outcome).startswith("alive on one")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_a_worker_that_is_ended_while_it_ends_says_nothing(tmp_path: Path, capfd) -> None:
    with make_pool(tmp_path, "one") as pool:
        results(pool, [("sigterm at exit", "")])
    assert len(list(tmp_path.iterdir())) == 1
    assert capfd.readouterr().err == ""


def test_leaving_on_an_error_ends_workers_in_the_middle_of_their_task(tmp_path: Path) -> None:
    def leave() -> None:
        with make_pool(tmp_path, "one") as pool, Path(os.devnull).open("rb") as always:
            results(pool, [("tell", "a")])
            pool.submit(1, ("wait", "50"))
            pool.wait(always.fileno())
            raise KeyError("left")

    with pytest.raises(KeyError, match="left"):
        leave()
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []


def test_waiting_ends_where_something_else_can_be_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with make_pool(tmp_path, "one") as pool:
        os.write(writing, b"x")
        assert pool.wait(reading) == ([], True)
        pool.submit(0, ("tell", "a"))
        assert pool.wait(reading) == ([], True)  # also while workers start
    os.close(reading)
    os.close(writing)
