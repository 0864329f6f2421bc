"""How many threads compute: as many as asked for, or as the machine lets run at once."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch

from engine import threads
from engine.api import Engine
from engine.machine import Machine, this_machine
from engine.threads import thread_count
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

SERVER = Machine("", (), cores=64, allowed=64, physical=32, quota=None, memory=None, available=None)
CONTAINER = replace(SERVER, quota=2.0)


@pytest.mark.parametrize(
    ("wanted", "present", "machine", "environ", "count"),
    [
        (None, 64, SERVER, {}, 32),  # torch may count hyperthreads
        (None, 32, CONTAINER, {}, 2),
        (None, 32, replace(SERVER, quota=0.3), {}, 1),
        (None, 32, replace(SERVER, allowed=4, physical=3), {}, 3),
        (None, 1, SERVER, {}, 1),  # set by the program that uses the library
        (None, 16, CONTAINER, {"OMP_NUM_THREADS": "16"}, 16),
        (None, 8, CONTAINER, {"MKL_NUM_THREADS": "8"}, 8),
        (None, 32, CONTAINER, {"OMP_NUM_THREADS": "", "OTHER_NUM_THREADS": "7"}, 2),
        (5, 32, CONTAINER, {"OMP_NUM_THREADS": "16"}, 5),
    ],
)
def test_what_was_asked_for_counts_then_the_environment_then_the_machine(
    wanted: int | None, present: int, machine: Machine, environ: Mapping[str, str], count: int
) -> None:
    assert thread_count(wanted, present, machine, environ) == count


@pytest.mark.parametrize(
    ("wanted", "environ", "sharing", "count"),
    [
        (None, {}, 4, 8),
        (None, {}, 5, 6),
        (None, {}, 100, 1),
        (None, {"OMP_NUM_THREADS": "32"}, 4, 8),
        (5, {}, 4, 5),
    ],
)
def test_processes_divide_the_cores_unless_told_otherwise(
    wanted: int | None, environ: Mapping[str, str], sharing: int, count: int
) -> None:
    assert thread_count(wanted, 32, SERVER, environ, sharing) == count


@pytest.fixture
def torch_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_loading_an_engine_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_threads: int
) -> None:
    build(Tiny("tiny", "Llama", {"vocab_size": 1000}), tmp_path)
    write_tokenizer(tmp_path)
    monkeypatch.setattr(threads, "this_machine", lambda: replace(this_machine(), quota=1.0))
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(4)
    Engine.load(tmp_path)
    assert torch.get_num_threads() == 1
    Engine.load(tmp_path, threads=3)
    assert torch.get_num_threads() == 3
    monkeypatch.setattr(threads, "this_machine", lambda: replace(this_machine(), quota=4.0))
    threads.set_threads(None, sharing=2)
    Engine.load(tmp_path)
    assert torch.get_num_threads() <= 2  # as a worker set them
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Engine.load(tmp_path)
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system doesn't bind threads")
def test_a_loading_thread_leaves_the_core_of_the_one_that_started_it() -> None:
    everywhere = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def load() -> None:
        found.append(os.sched_getaffinity(0))
        threads.use_all_cores()
        found.append(os.sched_getaffinity(0))

    def compute() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        loader = Thread(target=load)
        loader.start()
        loader.join()

    computing = Thread(target=compute)
    computing.start()
    computing.join()
    assert found == [{min(everywhere)}, everywhere]
    assert os.sched_getaffinity(0) == everywhere
