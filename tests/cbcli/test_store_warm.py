"""`cacheblend store warm`: what is missing is computed, what is damaged too, what is there read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cache_store.support import flip
from tests.cbcli.world import World, add_model, make_world

QUESTION = "When does the tide turn?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    assert world("ingest", "docs", "--chunk-tokens", "16").exit_code == 0
    return world


def warmed(world: World, *args: str, **options: Any) -> dict[str, int]:
    found = world.json("store", "warm", *args, **options)
    assert found.pop("seconds") > 0
    return found  # type: ignore[no-any-return]


def test_what_is_there_is_read_and_no_weights_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = {c["chunk_id"]: c["entries"][0] for c in world.chunks()}
    hits = world.json("store", "stats")["hits"]
    monkeypatch.setattr("engine.api.load_weights", lambda *args: pytest.fail("weights were read"))
    found = warmed(world, "--all")
    files = (world.root / "home/store/kv").glob("*.kv")
    sizes = sum(f.stat().st_size for f in files if f.name[:64] in _keys(chunks))
    assert found == {
        "chunks": len(chunks),
        "read": len(chunks),
        "bytes_read": sizes,
        "fetched": 0,
        "computed": 0,
        "damaged": 0,
    }
    assert world.json("store", "stats")["hits"] == hits  # nobody used them yet


def _keys(chunks: dict[str, Any]) -> set[str]:
    return {entry["key"] for entry in chunks.values()}


def test_what_is_missing_or_damaged_is_computed(world: World) -> None:
    first, second, *_ = world.chunks()
    world("store", "rm", first["chunk_id"])
    key = second["entries"][0]["key"]
    (file,) = (world.root / "home/store/kv").glob(f"{key}.*.kv")
    flip(file, file.stat().st_size - 1)
    found = warmed(world, first["chunk_id"], second["chunk_id"])
    assert (found["read"], found["computed"], found["damaged"]) == (0, 2, 1)
    assert world("store", "verify").exit_code == 0
    assert all(chunk["cached"] for chunk in world.chunks())
    both = ("--chunk", first["chunk_id"], "--chunk", second["chunk_id"])
    segments = world.json("ask", QUESTION, *both)["prompt"]["segments"]
    assert [s["status"] for s in segments if s["kind"] == "chunk"] == ["exact", "hit"]


def test_documents_are_made_ready_for_other_settings(world: World) -> None:
    args = ("--document", "docs/two.txt")
    chunks = warmed(world, *args)["chunks"]
    assert warmed(world, *args, "--system", "Be kind.")["computed"] == chunks
    assert warmed(world, *args, "--system", "Be kind.")["read"] == chunks
    assert warmed(world, *args, "--dtype", "bf16")["computed"] == chunks
    add_model(world.root, "second", seed=1)
    assert warmed(world, *args, model="second")["computed"] == chunks
    shown = world("store", "warm", *args).stdout
    assert f"{chunks} chunks ready" in shown or "1 chunk ready" in shown


@pytest.mark.parametrize(
    ("args", "code"),
    [((), 2), (("--all", "abcd"), 2), (("0000000000",), 3), (("--document", "none.md"), 3)],
)
def test_warm_wants_to_know_what(world: World, args: tuple[str, ...], code: int) -> None:
    assert world.error("store", "warm", *args, code=code)


def test_there_must_be_a_store(world: World) -> None:
    assert world.error("store", "warm", "--all", "--store", "none", code=3)
    assert not Path("none").exists()
