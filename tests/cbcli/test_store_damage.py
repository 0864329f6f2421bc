"""Damage as a user meets it: commands go on without what can't be used, and `ingest` mends it."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import cache_store.reading
from tests.cache_store.support import flip
from tests.cbcli.world import World, make_world

QUESTION = "Who keeps the log of every boat?"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("filled"), patch)
        world.json("ingest", "docs", "--chunk-tokens", "24")
        yield world


@pytest.fixture(scope="module")
def answer(filled: World) -> str:
    found: str = filled.json("ask", QUESTION, "--mode", "full")["answer"]
    return found


@pytest.fixture(scope="module")
def blended(filled: World) -> str:
    found: str = filled.json("ask", QUESTION)["answer"]
    return found


@pytest.fixture
def world(filled: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    shutil.copytree(filled.root, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    return World(tmp_path / "world")


def kv(world: World) -> Path:
    return world.root / "home/store/kv"


def damage_layers(world: World, number: int) -> list[Path]:
    chosen = sorted(kv(world).glob("*.kv"))[:number]
    for path in chosen:
        flip(path, -1)
    return chosen


def ingest(world: World, *args: str) -> tuple[dict[str, Any], list[str]]:
    result = world("ingest", "docs", "--chunk-tokens", "24", "--json", *args)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line)["warning"]["message"] for line in result.stderr.splitlines()]
    return json.loads(result.stdout), lines


def test_the_next_ingest_finds_damage_in_layers_and_mends_it(world: World) -> None:
    total = len(list(kv(world).glob("*.kv")))
    told, lines = ingest(world)
    assert (told["chunks"]["checked"], told["chunks"]["repaired"]) == (total, 0)
    assert told["bytes_checked"] == sum(p.stat().st_size for p in kv(world).glob("*.kv"))
    assert lines == []
    bad = damage_layers(world, 3)
    assert world("store", "verify").exit_code == 4
    told, lines = ingest(world)
    assert (told["chunks"]["checked"], told["chunks"]["repaired"]) == (total, 3)
    assert told["chunks"]["computed"] in (2, 3)  # the prefix is no chunk of a document
    assert len(lines) == 1
    assert all(path.name in lines[0] for path in bad)
    assert not any(path.exists() for path in bad)
    assert world("store", "verify").exit_code == 0
    told, lines = ingest(world)
    assert (told["chunks"]["repaired"], lines) == (0, [])


def test_the_prefix_is_mended_alone(world: World) -> None:
    chunks = {c["chunk_id"] for c in world.chunks()}
    for path in kv(world).glob("*.kv"):
        if not any(name.encode() in path.read_bytes()[:4096] for name in chunks):
            flip(path, -1)
    told, lines = ingest(world)
    assert (told["chunks"]["repaired"], told["chunks"]["computed"], len(lines)) == (1, 0, 1)
    assert world("store", "verify").exit_code == 0


def test_many_damaged_ones_are_one_line(world: World) -> None:
    bad = damage_layers(world, 8)
    result = world("ingest", "docs", "--chunk-tokens", "24")
    assert result.exit_code == 0
    (line,) = [line for line in result.stderr.splitlines() if "damaged" in line]
    assert f"and {len(bad) - 5} more" in line
    assert f"{len(bad)} damaged and mended" in result.stdout
    assert world("store", "verify").exit_code == 0


def test_headers_alone_are_looked_at_where_that_was_asked_for(world: World) -> None:
    (in_layer, in_header) = damage_layers(world, 2)
    flip(in_header, 40)
    told, lines = ingest(world, "--no-check")
    assert (told["chunks"]["checked"], told["chunks"]["repaired"]) == (0, 1)
    assert len(lines) == 1
    assert in_layer.exists()
    told, _ = ingest(world)
    assert told["chunks"]["repaired"] == 1
    assert world("store", "verify").exit_code == 0


def test_entries_that_no_list_names_are_found_again_after_an_ingest(world: World) -> None:
    with closing(sqlite3.connect(kv(world) / "cache.db")) as connection:
        connection.execute("UPDATE Cache SET value = x'00' WHERE filename IS NULL")
        connection.commit()
    assert world("store", "verify").exit_code == 4
    told, _ = ingest(world)
    assert told["chunks"]["computed"] == 0
    assert told["chunks"]["repaired"] == told["chunks"]["checked"] > 3
    again, lines = ingest(world)
    assert (again["chunks"]["computed"], again["chunks"]["repaired"], lines) == (0, 0, [])
    assert world("store", "verify").exit_code == 0


# The databases.


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


HARMS: list[Callable[[Path], None]] = [random_bytes, truncated, emptied, gone]


def warnings(text: str) -> list[str]:
    return [json.loads(line)["warning"]["message"] for line in text.splitlines()]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_prompts_go_on_without_a_damaged_index(
    world: World, answer: str, harm: Callable[[Path], None]
) -> None:
    names = sorted(path.name for path in kv(world).glob("*.kv"))
    harm(kv(world) / "cache.db")
    asked = world("ask", QUESTION, "--json")
    assert asked.exit_code == 0, asked.output
    told = json.loads(asked.stdout)
    assert told["answer"] == answer
    chunks = [s for s in told["prompt"]["segments"] if s["kind"] == "chunk"]
    assert [s["reason"] for s in chunks] == ["damaged"] * len(chunks)
    (line,) = warnings(asked.stderr)
    assert "cache.db" in line
    lines = json.dumps({"question": QUESTION})
    (world.root / "in.jsonl").write_text(lines + "\n")
    ran = world("run", "in.jsonl")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout.splitlines()[0])["answer"] == answer
    assert len([line for line in ran.stderr.splitlines() if "cache.db" in line]) == 1
    listed = world.error("store", "ls", code=4)
    assert "cache.db" in listed["message"]
    told, lines = ingest(world)
    assert told["chunks"]["computed"] == 0
    assert len(lines) == 1
    assert sorted(path.name for path in kv(world).glob("*.kv")) == names
    again = world.json("ask", QUESTION)
    assert again["prompt"]["segments"][1]["status"] == "exact"
    assert world("store", "verify").exit_code == 0


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_damaged_catalog_is_one_line_and_made_anew(
    world: World, blended: str, harm: Callable[[Path], None]
) -> None:
    harm(world.root / "home/store/catalog.db")
    for command in (["ask", QUESTION], ["store", "ls"]):
        result = world(*command, "--json")
        assert "Traceback" not in result.output
        if result.exit_code == 0:  # an empty one is one that was about to be made
            assert harm in (emptied, gone)
        else:
            assert result.exit_code in (3, 4)
            assert len(result.stderr.splitlines()) == 1
    told, _ = ingest(world)
    assert told["chunks"]["computed"] == 0
    assert told["documents"]["new"] == 3
    assert world.json("ask", QUESTION)["answer"] == blended
    assert world("store", "verify").exit_code in (0, 4)
    assert world("store", "verify", "--repair").exit_code in (0, 4)
    assert world("store", "verify").exit_code == 0


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store.reading, "READ_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_prompts_go_on_without_a_locked_index(world: World, answer: str) -> None:
    with locked(kv(world) / "cache.db"):
        asked = world("ask", QUESTION, "--json")
        assert asked.exit_code == 0, asked.output
        assert json.loads(asked.stdout)["answer"] == answer
        assert len(warnings(asked.stderr)) == 1
        assert "in use by another process" in asked.stderr
    assert world.json("ask", QUESTION)["prompt"]["segments"][1]["status"] == "exact"


@pytest.mark.usefixtures("impatient")
def test_a_locked_catalog_is_one_line(world: World, blended: str) -> None:
    with locked(world.root / "home/store/catalog.db"):
        error = world.error("ask", QUESTION, code=1)
        assert "catalog.db is in use by another process" in error["message"]
    assert world.json("ask", QUESTION)["answer"] == blended
