"""`cacheblend ingest --devices`: the same store, from several processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli.world import TEXTS, World, make_world

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def listed(world: World, store: str) -> list[tuple[Any, ...]]:
    found = world.json("store", "ls", "--store", store)["chunks"]
    return [(c["source"], c["chunk_id"], c["tokens"], c["cached"]) for c in found]


def test_two_devices_fill_the_same_store(world: World) -> None:
    """Chunks, documents and their order are as one process leaves them."""
    for number in range(9):
        text = " ".join(f"Buoy {number}-{i} is red and {i * 7} feet long." for i in range(30))
        (world.docs / f"many{number}.txt").write_text(text)
    args = ("ingest", "docs", "--chunk-tokens", "64")
    alone = world.json(*args, "--store", "alone")
    shared = world.json(*args, "--store", "shared", "--devices", "cpu,cpu")
    for told in (alone, shared):
        del told["seconds"]
    assert shared == alone
    assert shared["documents"]["new"] == len(TEXTS) + 9
    assert listed(world, "shared") == listed(world, "alone") != []
    assert all(cached for *_, cached in listed(world, "shared"))
    assert world("store", "verify", "--store", "shared").exit_code == 0
    again = world.json(*args, "--store", "shared", "--devices", "cpu,cpu")
    assert again["chunks"]["computed"] == 0
    asked = [
        world.json("ask", "Which buoy is red?", "--store", store)["output_token_ids"]
        for store in ("alone", "shared")
    ]
    assert asked[0] == asked[1]


def test_workers_compute_behind_the_context_that_is_asked_for(world: World) -> None:
    world.json("ingest", "docs", "--devices", "cpu,cpu")
    told = world.json("ingest", "docs", "--devices", "cpu,cpu", "--context", "bos")
    assert told["chunks"]["computed"] == told["chunks"]["total"]
    for chunk in world.json("store", "ls")["chunks"]:
        assert sorted(entry["context"] for entry in chunk["entries"]) == ["bos", "prefix"]
    alone = world.json("ingest", "docs", "--context", "bos")
    assert alone["chunks"]["computed"] == 0
    assert world("store", "verify").exit_code == 0


def test_one_device_needs_no_other_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.workers

    monkeypatch.setattr(engine.workers, "WorkerPool", lambda *args: pytest.fail("workers"))
    assert world.json("ingest", "docs", "--devices", "cpu")["documents"]["new"] == 3
    monkeypatch.setenv("CACHEBLEND_DEVICES", "cpu,cpu")
    assert world.json("ingest", "docs", "--device", "cpu")["documents"]["unchanged"] == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--devices", "cpu,cpu", "--device", "cpu"), "exclude each other"),
        (("--devices", "cpu,cuda:77"), "cuda:77"),
        (("--devices", "cpu,quantum"), "quantum"),
    ],
)
def test_bad_devices_are_named_before_any_work(
    world: World, args: tuple[str, ...], words: str
) -> None:
    assert words in world.error("ingest", "docs", *args, code=2)["message"]
    assert not (world.root / "home" / "store").exists()


def test_an_interrupt_ends_all_processes_and_the_next_run_goes_on(world: World) -> None:
    for number in range(120):
        text = " ".join(f"Buoy {number}-{i} is red and {i * 7} feet long." for i in range(90))
        (world.docs / f"many{number}.txt").write_text(text)
    env = {
        **os.environ,
        "CACHEBLEND_HOME": str(world.root / "home"),
        "CACHEBLEND_MODEL": "tiny",
        "CACHEBLEND_DTYPE": "fp32",
        "CACHEBLEND_LIMIT": "2GB",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", "from cbcli.main import main; main()", "ingest", "docs"]
    process = subprocess.Popen(
        [*command, "--json", "--devices", "cpu,cpu"],
        env=env,
        cwd=world.root,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    kv = world.root / "home" / "store" / "kv"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and sum(1 for p in kv.rglob("*.kv") if p.is_file()) < 30:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C at a terminal: to all of them
    _, stderr = process.communicate(timeout=60)  # not before the workers are gone: it's theirs too
    assert process.returncode == 130, stderr
    assert len(stderr.splitlines()) == 1, stderr
    error = json.loads(stderr)["error"]
    assert error["kind"] == "interrupted"
    checked = world("store", "verify")
    assert checked.exit_code == 0, checked.output
    stored = int(error["message"].split()[1])
    told = world.json("ingest", "docs", "--devices", "cpu,cpu")
    assert told["chunks"]["computed"] <= told["chunks"]["total"] - stored
    assert told["chunks"]["computed"] < told["chunks"]["total"]
    assert all(c["cached"] for c in world.chunks())
