"""Work in the background: in order, bounded, its errors not lost, ended by an interrupt."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from engine.write_behind import WriteBehind


def noting(done: list[int], number: int, steps: int = 2) -> Iterator[None]:
    for _ in range(steps):
        done.append(number)
        yield


def failing() -> Iterator[None]:
    yield
    raise OSError("no space")


def run(jobs: Iterable[Iterable[object]], then: Callable[[], None] = lambda: None) -> None:
    with WriteBehind(depth=1) as behind:
        for job in jobs:
            behind.submit(job)
        then()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_jobs_run_in_order_beside_the_caller() -> None:
    done: list[int] = []
    go = threading.Event()

    def waiting() -> Iterator[None]:
        assert go.wait(10)  # set only after `submit` has returned
        yield

    with WriteBehind(depth=3) as behind:
        for job in (waiting(), noting(done, 1), noting(done, 2)):
            behind.submit(job)
        assert done == []
        go.set()
    assert done == [1, 1, 2, 2]
    assert "write-behind" not in threads()


def test_no_more_jobs_are_unfinished_than_there_is_room_for() -> None:
    done: list[int] = []
    with WriteBehind(depth=2) as behind:
        for submitted in range(1, 50):
            behind.submit(noting(done, submitted, steps=1))
            assert submitted - len(done) <= 2
    assert len(done) == 49


def test_an_error_ends_what_comes_after_and_reaches_the_caller() -> None:
    done: list[int] = []
    with pytest.raises(OSError, match="no space"):
        run([noting(done, 1), failing()])
    with pytest.raises(OSError, match="no space"):
        run([failing(), noting(done, 2), noting(done, 3)])
    assert done == [1, 1]
    assert "write-behind" not in threads()


def test_an_error_of_the_caller_lets_the_jobs_finish() -> None:
    done: list[int] = []

    def mine() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run([noting(done, 1, steps=5)], then=mine)
    assert done == [1] * 5


@pytest.mark.parametrize("waiting", [False, True], ids=["before it waits", "while it waits"])
def test_an_interrupt_ends_it_after_the_step_being_done(waiting: bool) -> None:
    begun = threading.Event()
    done: list[int] = []
    behind = WriteBehind(depth=1)

    def slow() -> Iterator[None]:
        for number in range(5):
            begun.set()
            if waiting and number == 0:
                while behind._jobs.empty():  # until the caller has begun to wait
                    time.sleep(0.001)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while not behind._stopped:
                time.sleep(0.001)
            done.append(number)
            yield

    def leave() -> None:
        with behind:
            behind.submit(slow())
            assert begun.wait(10)
            if not waiting:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert done == [0]
    assert "write-behind" not in threads()
