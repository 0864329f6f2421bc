"""`ingest --watch`: the store follows the files, round by round, until it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli import schemas
from tests.cbcli.world import World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def watched(
    world: World, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object], args: Any = ()
) -> tuple[list[Any], str]:
    """What each round prints, and stderr; every step is done while the command waits, Ctrl-C after
    the last."""
    from engine.documents.watching import Watch

    left = list(steps)

    def wait(self: Watch, seconds: float | None = None) -> bool:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()
        return True

    monkeypatch.setattr(Watch, "wait", wait)
    monkeypatch.setattr(Watch, "_listen", lambda self: None)
    result = world("ingest", "--watch", "docs", "--json", *args)
    assert result.exit_code == 130, result.output
    rounds = [json.loads(line) for line in result.stdout.splitlines()]
    for told in rounds:
        schemas.check("ingest", told)
    return rounds, result.stderr


def sources(world: World) -> list[str]:
    return sorted({Path(chunk["source"]).name for chunk in world.chunks()})


def test_the_store_follows_the_files_with_one_model_load(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine.api

    loads: list[object] = []
    load = engine.api.load_weights
    monkeypatch.setattr(engine.api, "load_weights", lambda *a: loads.append(a) or load(*a))
    one, two = world.docs / "one.md", world.docs / "two.txt"
    copied = two.read_text()

    def change() -> None:
        one.write_text("The log is bound in calf.\n")
        (world.docs / "new.md").write_text("The quay is long.\n")

    def save_by_rename() -> None:
        (world.docs / "one.tmp~").write_text("The log is bound in cloth.\n")
        (world.docs / "one.tmp~").rename(one)

    def move() -> None:
        two.rename(world.docs / "moved.txt")

    (first, changed, saved, moved, removed, ignored), _ = watched(
        world,
        monkeypatch,
        lambda: None,  # a change of something that isn't read
        change,
        save_by_rename,
        move,
        (world.docs / "new.md").unlink,
        lambda: (world.docs / ".gitignore").write_text("sub/\n"),
    )
    assert len(loads) == 1
    assert (first["round"], first["documents"]["new"], first["removed"]) == (0, 3, [])
    assert (changed["round"], changed["documents"]) == (
        1,
        {"new": 1, "changed": 1, "unchanged": 0},
    )
    assert changed["chunks"]["dropped"] >= 1
    assert (saved["documents"]["changed"], saved["removed"]) == (1, [])
    assert moved["documents"] == {"new": 1, "changed": 0, "unchanged": 0}
    assert [Path(source).name for source in moved["removed"]] == ["two.txt"]
    assert moved["chunks"]["computed"] == 0  # the same text: its KV stays
    assert moved["chunks"]["dropped"] == 0
    assert [Path(source).name for source in removed["removed"]] == ["new.md"]
    assert removed["chunks"]["dropped"] == 1
    assert [Path(source).name for source in ignored["removed"]] == ["three.rst"]
    assert ignored["skipped_counts"] == {"hidden": 1, "ignored": 1}
    assert sources(world) == ["moved.txt", "one.md"]
    assert all(chunk["cached"] for chunk in world.chunks())
    assert world.json("ingest", "docs/moved.txt")["chunks"]["computed"] == 0
    assert copied == (world.docs / "moved.txt").read_text()
    assert world("store", "verify").exit_code == 0


def test_what_went_while_nobody_watched_is_taken_out_and_the_rest_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.root / "far.md").write_text("Far away.\n")
    world.json("ingest", "docs", "far.md")
    (world.docs / "two.txt").unlink()
    (world.root / "far.md").unlink()
    assert world.json("ingest", "docs")["removed"] == []  # without --watch nothing is
    ((first,), _) = watched(world, monkeypatch)
    assert [Path(source).name for source in first["removed"]] == ["two.txt"]
    assert sources(world) == ["far.md", "one.md", "three.rst"]


def test_a_round_that_fails_is_told_and_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_store.errors import StoreFullError
    from cbcli.ingest_run import IngestRun

    ingest = IngestRun.ingest
    rounds: list[int] = []

    def failing(self: IngestRun, *args: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 2:
            raise StoreFullError("the store is full", "raise its limit")
        return ingest(self, *args)

    monkeypatch.setattr(IngestRun, "ingest", failing)
    (first, second), told = watched(
        world,
        monkeypatch,
        lambda: (world.docs / "one.md").write_text("Once more.\n"),
        (world.docs / "two.txt").unlink,
    )
    assert "the store is full" in told
    assert first["documents"]["new"] == 3
    assert second["documents"]["changed"] == 1
    assert [Path(source).name for source in second["removed"]] == ["two.txt"]


def test_what_cannot_be_watched_is_refused(world: World) -> None:
    for args in (("docs", "--dry-run"), ("-",), ("--files-from", "-")):
        assert world.error("ingest", "--watch", *args, code=2)["message"]
