"""Documents that changed on the disk: what `ask` and `run` say of them, and `prune` removes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cache_store.store import ChunkStore
from tests.cbcli.world import World, add_model, make_world

QUESTION = "When does the tide turn?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    assert world("ingest", "docs").exit_code == 0
    return world


def warnings(world: World, *args: str) -> list[str]:
    result = world("ask", QUESTION, *args, "--json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line)["warning"]["message"] for line in result.stderr.splitlines()]


def facts(world: World, name: str) -> tuple[int, int]:
    with ChunkStore.open(world.root / "home/store", read_only=True) as store:
        info = store.catalog.document(str(world.docs / name))
        assert info is not None
        return info.size, info.mtime_ns


def test_a_changed_document_is_named_once_with_what_to_do(world: World) -> None:
    assert warnings(world) == []
    (world.docs / "one.md").write_text("# Tides\n\nThe tide turns no more.\n")
    (said,) = warnings(world)
    assert "docs/one.md has changed" in said
    assert "cacheblend ingest docs/one.md" in said
    two = next(c["chunk_id"] for c in world.chunks() if c["source"].endswith("two.txt"))
    assert warnings(world, "--chunk", two) == []  # only what is used
    world("ingest", "docs/one.md")
    assert warnings(world) == []


def test_a_document_only_touched_is_not_and_is_read_once(world: World) -> None:
    path = world.docs / "one.md"
    os.utime(path, ns=(1, 10**18))
    assert facts(world, "one.md")[1] != 10**18
    assert warnings(world) == []
    assert facts(world, "one.md") == (path.stat().st_size, 10**18)


def test_ingesting_again_what_is_the_same_notes_its_new_time(world: World) -> None:
    os.utime(world.docs / "one.md", ns=(1, 10**18))
    assert "1 unchanged" in world("ingest", "docs/one.md").stdout
    assert facts(world, "one.md")[1] == 10**18


def test_a_file_that_is_gone_is_said(world: World) -> None:
    (world.docs / "one.md").unlink()
    (said,) = warnings(world)
    assert "docs/one.md is gone" in said
    assert "store rm --document docs/one.md" in said


def test_run_says_it_with_the_first_line_that_uses_it(world: World) -> None:
    lines = [{"question": QUESTION}, {"question": QUESTION}]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (world.docs / "one.md").write_text("Another.\n")
    said = world("run", "in.jsonl").stderr
    assert said.count("one.md has changed") == 1
    assert "line 1: docs/one.md" in said


def test_text_of_no_file_here_is_never_missed(world: World) -> None:
    text = "The tide table hangs by the door.\n"
    assert world("ingest", "-", "--stdin-name", "table", input=text).exit_code == 0
    world("store", "export", "all.tar")
    world("store", "import", "all.tar", "--store", "other")
    shutil.rmtree(world.docs)
    assert not any("table" in said for said in warnings(world))
    assert warnings(world, "--store", "other") == []
    assert world.json("store", "prune", "--missing-sources", "--store", "other")["documents"] == []


def test_prune_of_missing_sources(world: World) -> None:
    (world.docs / "two.txt").unlink()
    would = world.json("store", "prune", "--missing-sources", "--dry-run")
    assert [Path(source).name for source in would["documents"]] == ["two.txt"]
    assert would["bytes_freed"] > 0
    assert len(world.json("store", "ls")["documents"]) == 3
    did = world.json("store", "prune", "--missing-sources")
    assert (did["documents"], did["entries"]) == (would["documents"], would["entries"])
    assert did["bytes_freed"] == would["bytes_freed"]
    assert len(world.json("store", "ls")["documents"]) == 2
    assert "removed 0 entries" in world("store", "prune", "--missing-sources").stdout


def test_prune_of_what_is_stale_leaves_what_is_used(world: World) -> None:
    entries = world.json("store", "stats")["entries"]
    shutil.rmtree(world.root / "home/models/tiny")
    add_model(world.root, "tiny", seed=7)  # other weights, the same name
    assert world("ingest", "docs").exit_code == 0
    assert world.json("store", "stats")["entries"] == 2 * entries
    did = world.json("store", "prune", "--stale")
    assert (did["entries"], did["cut_otherwise"]) == (entries, [])
    listed = world.json("store", "ls")["chunks"]
    assert {e["usable"] for chunk in listed for e in chunk["entries"]} == {"yes"}
    assert "miss" not in {s["status"] for s in world.json("ask", QUESTION)["prompt"]["segments"]}
    assert world.json("store", "prune", "--stale")["entries"] == 0
    kinds = world.json("store", "prune", "--stale", "--dtype", "bf16", "--dry-run")
    assert kinds["entries"] == entries
    Path("cacheblend.toml").write_text("chunk_tokens = 99\n")
    assert len(world.json("store", "prune", "--stale")["cut_otherwise"]) == 3


def test_prune_by_age_model_and_size(world: World) -> None:
    entries = world.json("store", "stats")["entries"]
    assert world.json("store", "prune", "--unused-for", "1h")["entries"] == 0
    assert world.json("store", "prune", "--older-than", "0s", "--dry-run")["entries"] == entries
    assert world.json("store", "prune", "--over", "500MB")["entries"] == 0
    error = world.error("store", "prune", "--model", "tinny", code=3)
    assert "'tiny'" in error["hint"]
    done = world("store", "prune", "--over", "0")
    assert f"removed {entries} entries" in done.stdout
    assert "still at" in done.stderr
    assert len(world.json("store", "ls", "--missing")["chunks"]) == 3  # their text stays


@pytest.mark.parametrize(
    "args", [(), ("--dry-run",), ("--older-than", "soon"), ("--over", "much"), ("--unused-for", "")]
)
def test_prune_wants_to_know_what(world: World, args: tuple[str, ...]) -> None:
    assert world.error("store", "prune", *args, code=2)["kind"] == "usage"
