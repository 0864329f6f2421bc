"""`cacheblend store export` and `import`, as their user sees them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, put
from tests.cbcli.terminal import run
from tests.cbcli.world import World, make_world

COMMAND = (sys.executable, "-c", "from cbcli.entry import main; main()")
QUESTION = "When does the tide turn?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    assert world("ingest", "docs", "--chunk-tokens", "16").exit_code == 0
    return world


def answered(world: World, *args: str) -> tuple[str, list[str]]:
    result = world.json("ask", QUESTION, *args)
    return result["answer"], [s["status"] for s in result["prompt"]["segments"]]


def test_answers_from_an_imported_store_are_the_same(world: World) -> None:
    first = answered(world)
    done = world.json("store", "export", "all.tar")
    assert (done["documents"], done["file"]) == (3, "all.tar")
    assert done["bytes"] == Path("all.tar").stat().st_size
    taken = world.json("store", "import", "all.tar", "--store", "other")
    assert (taken["documents"], taken["entries"], taken["new"]) == (3, done["entries"], True)
    assert answered(world, "--store", "other", "--no-save") == first
    assert "miss" not in first[1]
    again = world("store", "import", "all.tar", "--store", "other")
    assert "0 documents and 0 entries taken in" in again.stdout
    assert "3 documents" in again.stdout
    assert world("store", "verify", "--store", "other").exit_code == 0


def test_one_document_of_one_model(world: World) -> None:
    model = world.chunks()[0]["entries"][0]["model"]["fingerprint"]
    for choice in ("tiny", model[:10]):
        args = ("--document", "docs/two.txt", "--model", choice, "--force")
        assert world.json("store", "export", "two.tar", *args)["documents"] == 1
    world("store", "import", "two.tar", "--store", "other")
    listed = world.json("store", "ls", "--store", "other")
    assert [Path(d["source"]).name for d in listed["documents"]] == ["two.txt"]
    assert all(chunk["cached"] for chunk in listed["chunks"])
    error = world.error("store", "export", "x.tar", "--document", "docs/tow.txt", code=3)
    assert "docs/two.txt" in error["hint"]
    assert "'tiny'" in world.error("store", "export", "x.tar", "--model", "tinny", code=3)["hint"]
    assert not Path("x.tar").exists()


def test_a_pipe_between_two_stores(world: World) -> None:
    raw = subprocess.run(
        [*COMMAND, "store", "export", "-"],
        capture_output=True,
        env={**os.environ, "CACHEBLEND_HOME": str(world.root / "home"), "PYTHONPATH": _here()},
    )
    assert raw.returncode == 0, raw.stderr
    taken = subprocess.run(
        [*COMMAND, "store", "import", "-", "--store", "piped"],
        input=raw.stdout,
        capture_output=True,
        env={**os.environ, "CACHEBLEND_HOME": str(world.root / "home"), "PYTHONPATH": _here()},
    )
    assert taken.returncode == 0, taken.stderr
    assert b"3 documents" in taken.stdout


def _here() -> str:
    return str(Path(__file__).parents[2])


def test_a_changed_document_is_refused_kept_or_replaced(world: World) -> None:
    world("store", "export", "all.tar")
    (world.docs / "two.txt").write_text("Another text altogether.\n")
    assert world("ingest", "docs/two.txt").exit_code == 0
    error = world.error("store", "import", "all.tar", code=2)
    assert "two.txt" in error["message"]
    assert "--replace" in error["hint"]
    assert world.json("store", "import", "all.tar", "--keep")["documents"] == 0
    assert "Another text" in world("store", "ls", "--filter", "two.txt").stdout
    assert world.json("store", "import", "all.tar", "--replace")["documents_replaced"] == 1
    assert "Another text" not in world("store", "ls", "--filter", "two.txt").stdout


def test_a_damaged_archive_is_exit_4_and_what_came_before_stays(world: World) -> None:
    world("store", "export", "all.tar")
    data = Path("all.tar").read_bytes()
    Path("half.tar").write_bytes(data[: len(data) // 2])
    error = world.error("store", "import", "half.tar", "--store", "other", code=4)
    assert error["kind"] == "integrity"
    assert "chunks/" in error["message"] or "documents/" in error["message"]
    assert world("store", "verify", "--store", "other").exit_code == 0
    assert world.json("store", "stats", "--store", "other")["entries"]
    rest = world.json("store", "import", "all.tar", "--store", "other")
    assert rest["entries_kept"] > 0
    for other in (b"no archive at all", b"", b"a line of many" * 100, bytes(2048)):
        Path("no.tar").write_bytes(other)
        error = world.error("store", "import", "no.tar", "--store", "third", code=4)
        assert "no archive of cacheblend" in error["message"]
    assert not Path("third").exists()  # none is made for nothing
    assert world.error("store", "import", "none.tar", code=3)["kind"] == "not_found"


def test_what_cannot_be_written_is_said_first(world: World) -> None:
    Path("there.tar").write_text("mine")
    assert "--force" in world.error("store", "export", "there.tar", code=2)["hint"]
    assert Path("there.tar").read_text() == "mine"
    assert world.error("store", "export", "docs", code=2)
    assert world.error("store", "export", "no/such/a.tar", code=2)
    assert world.error("store", "export", "-", code=2)  # --json has standard output
    assert world.error("store", "import", "there.tar", "--keep", "--replace", code=2)
    assert run("store", "export", "a.tar", "--store", "nowhere").exit_code == 3
    assert not Path("nowhere").exists()


def test_no_file_of_the_store_no_device_and_no_pipe_is_replaced(world: World) -> None:
    store = world.root / "home/store"
    catalog = (store / "catalog.db").read_bytes()
    Path("there").symlink_to(store)
    os.mkfifo("pipe")
    os.mkfifo("new.tar.part")
    Path("round.tar").symlink_to("round.tar")
    for target in (store / "catalog.db", store / "a.tar", "there/kv/a.tar"):
        error = world.error("store", "export", str(target), "--force", code=2)
        assert "in the folder of the store" in error["message"]
    for target in ("pipe", "/dev/null", "new.tar"):
        error = world.error("store", "export", target, "--force", code=2)
        assert "is not a regular file" in error["message"]
    assert world.error("store", "export", "round.tar", code=2)
    assert (store / "catalog.db").read_bytes() == catalog
    assert not list(store.rglob("*.tar*"))
    assert Path("pipe").is_fifo()


def test_a_link_is_followed(world: World) -> None:
    Path("far").mkdir()
    Path("a.tar").symlink_to("far/b.tar")
    assert world("store", "export", "a.tar").exit_code == 0
    assert Path("a.tar").is_symlink()
    assert [item.name for item in Path("far").iterdir()] == ["b.tar"]
    assert world.error("store", "export", "a.tar", code=2)["message"].endswith("is there already")


def test_what_is_damaged_is_left_out_and_the_rest_exported(world: World) -> None:
    sound = world.json("store", "export", "sound.tar")
    damaged, unreadable = sorted((world.root / "home/store/kv").rglob("*.kv"))[:2]
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    hidden = unreadable.stat().st_mode
    unreadable.chmod(0)
    root = os.access(unreadable, os.R_OK)  # root may read all
    result = world.json("store", "export", "rest.tar", code=4)
    unreadable.chmod(hidden)
    assert len(result["damaged"]) == (1 if root else 2)
    assert result["entries"] == sound["entries"] - len(result["damaged"])
    assert world("store", "import", "rest.tar", "--store", "other").exit_code == 0


@pytest.mark.parametrize(
    ("command", "into", "said"),
    [
        ("export -", ">&-", "standard output is closed"),
        ("export -", "> /dev/full", "standard output: No space left on device"),
        ("ls", "> /dev/full", "standard output: No space left on device"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_a_failure(
    world: World, command: str, into: str, said: str
) -> None:
    line = f"{shlex.join(COMMAND)} store {command} {into}"
    env = {**os.environ, "CACHEBLEND_HOME": str(world.root / "home"), "PYTHONPATH": _here()}
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=env, text=True)
    assert done.returncode == 1
    assert f"error: {said}" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("command", ["export", "import"])
def test_an_interrupt_says_how_to_go_on(tmp_path: Path, command: str) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**28) as store:
        for number in range(60):
            put(store, (number,) * 32, spec=BIG)
    path = tmp_path / "a.tar"
    start = [*COMMAND, "store"]
    export = [*start, "export", str(path), "--store", str(tmp_path / "store")]
    args = export
    if command == "import":
        assert subprocess.run(export, capture_output=True).returncode == 0
        args = [*start, "import", "-", "--store", str(tmp_path / "other")]
    child = subprocess.Popen(
        [*args, "--json"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _here()},
    )
    assert child.stdin is not None
    if command == "import":  # it waits for the rest
        data = path.read_bytes()
        child.stdin.write(data[: len(data) // 2])
        child.stdin.flush()
        while not list((tmp_path / "other/kv").glob("*.kv")):
            assert child.poll() is None
    else:
        part = path.with_name("a.tar.part")
        while not part.exists():
            assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, said = child.communicate()
    if child.returncode == 0:  # a fast disk: it was through
        assert command == "export"
        return
    assert child.returncode == 130
    error: Any = json.loads(said.splitlines()[-1])["error"]
    assert error["kind"] == "interrupted"
    assert "same command" in error["hint"]
    done = subprocess.run(
        export
        if command == "export"
        else [*start, "import", str(path), "--store", str(tmp_path / "other")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": _here()},
    )
    assert done.returncode == 0, done.stderr
    if command == "import":
        with ChunkStore.open(tmp_path / "other") as other:
            assert sum(1 for _ in other.entries()) == 60


@pytest.mark.parametrize("command", ["export", "import"])
def test_each_has_help_with_an_example(command: str) -> None:
    shown = run("store", command, "--help").stdout
    assert "Examples:" in shown
    assert "--json" in shown
