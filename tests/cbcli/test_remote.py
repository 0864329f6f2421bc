"""The commands over a remote: what one machine ingested, another one has."""

import json
from pathlib import Path

import pytest

from tests.cache_store.tiers.servers import free_port
from tests.cbcli.world import World, make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "shared").mkdir()
    return make_world(tmp_path, monkeypatch)


def test_another_machine_downloads_what_one_has_ingested(world: World) -> None:
    remote = ("--remote", f"file://{world.root}/shared")
    first = world.json("ingest", "docs", *remote)
    assert (first["chunks"]["computed"], first["chunks"]["downloaded"]) == (3, 0)
    again = ("--store", str(world.root / "b"))
    second = world.json("ingest", "docs", *remote, *again)
    assert (second["chunks"]["computed"], second["chunks"]["downloaded"]) == (0, 3)
    answer = world.json("ask", "Who keeps the log?", "--remote", "none", *again)
    assert answer["kv"]["tier"] == "disk"
    plain = world.json("ask", "Who keeps the log?")
    assert answer["output_token_ids"] == plain["output_token_ids"]
    result = world("ingest", "docs", *remote, "--store", str(world.root / "c"))
    assert result.stdout.splitlines()[-1] == "downloaded 3 chunks that the remote store had"


def test_an_answer_says_which_tier_it_came_from_and_keeps_it(world: World) -> None:
    remote = ("--remote", f"file://{world.root}/shared")
    world.json("ingest", "docs", *remote)
    world.json("store", "rm", *(chunk["chunk_id"] for chunk in world.chunks()))
    asked = ("ask", "Who keeps the log?", "--no-save", *remote)
    first, second = world.json(*asked), world.json(*asked)
    # The prefix is still here; the chunks are not.
    assert first["kv"]["tier"] == "mixed"
    assert set(first["kv"]["tiers"]) == {"disk", "remote"}
    assert second["kv"]["tiers"] == {"disk": first["kv"]["bytes_loaded"]}
    assert first["output_token_ids"] == second["output_token_ids"]


def test_a_remote_that_is_down_is_told_and_pushed_to_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.tiers.uploads._PAUSE_SECONDS", 0.01)
    down = ("--remote", f"redis://me:sesame@127.0.0.1:{free_port()}")
    result = world("ingest", "docs", *down)
    assert result.exit_code == 0
    assert "computed 3 chunks" in result.stdout
    assert "still to be uploaded" in result.stderr
    assert "sesame" not in result.output
    asked = world("ask", "Who keeps the log?", *down)
    assert asked.exit_code == 0
    failed = world.error("store", "push", *down, code=1)
    assert "sesame" not in str(failed)
    assert world.json("store", "stats")["pending_uploads"] == 4  # with the prefix
    assert "to upload" in world("store", "stats").stdout
    there = ("--remote", f"file://{world.root}/shared")
    assert world.json("store", "push", *there)["uploaded"] == 4
    assert world.json("store", "push", *there)["uploaded"] == 0
    again = world.json("store", "push", "--all", *there)
    assert (again["uploaded"], again["there"], again["left"]) == (0, 4, 0)
    assert "4 were there already" in world("store", "push", "--all", *there).stdout
    assert "--all" in world("store", "push", *there).stderr


def test_stats_tells_the_bytes_of_each_tier(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.json("ingest", "docs")
    alone = world.json("store", "stats")
    assert [(tier["name"], tier["bytes"]) for tier in alone["tiers"]] == [("disk", alone["used"])]
    assert not any(line.startswith("tiers") for line in world("store", "stats").stdout.splitlines())
    monkeypatch.setenv("CACHEBLEND_MEMORY_LIMIT", "2MB")
    monkeypatch.setenv("CACHEBLEND_REMOTE", "redis://me:sesame@127.0.0.1:6399/1")
    found = world.json("store", "stats")
    memory, disk, remote = found["tiers"]
    assert (memory["name"], memory["bytes"], memory["limit"]) == ("memory", None, 2_000_000)
    assert (disk["bytes"], disk["limit"]) == (found["used"], found["limit"])
    assert (remote["bytes"], remote["where"]) == (None, "redis://***@127.0.0.1:6399/1")
    shown = world("store", "stats")
    assert "tiers" in shown.stdout
    assert "2.0 MB, each process its own" in shown.stdout
    assert "sesame" not in shown.output


def test_a_folder_that_is_not_there_is_not_made(world: World) -> None:
    remote = ("--remote", f"file://{world.root}/mnt/shared")
    result = world("ingest", "docs", *remote)
    assert (result.exit_code, "there is no such folder" in result.stderr) == (0, True)
    asked = world("ask", "Who keeps the log?", *remote)
    assert (asked.exit_code, "there is no such folder" in asked.stderr) == (0, False)
    assert "mount" in world.error("store", "push", *remote, code=1)["hint"]
    assert not (world.root / "mnt").exists()


def test_doctor_looks_at_the_remote(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> dict[str, object]:
        found = world.json("doctor", "--no-probe")["checks"]
        (remote,) = [check for check in found if check["name"] == "remote"]
        return remote

    monkeypatch.setenv("CACHEBLEND_REMOTE", f"file://{world.root}/shared")
    assert (check()["state"], check()["facts"]["writable"]) == ("ok", True)
    assert not any((world.root / "shared").rglob("v1/*/*"))
    monkeypatch.setenv("CACHEBLEND_REMOTE", f"redis://:sesame@127.0.0.1:{free_port()}")
    assert check()["state"] == "warn"
    assert "sesame" not in str(check())


def test_settings_show_no_password_and_refuse_what_is_no_address(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHEBLEND_REMOTE", "redis://me:sesame@host/0")
    assert world.json("config", "show")["remote"]["value"] == "redis://***@host/0"
    assert "sesame" not in world("config", "show").output
    error = world.error("ask", "x", "--remote", "http://me:sesame@host", code=2)
    assert "sesame" not in str(error)
    assert "redis://" in error["hint"]
    monkeypatch.delenv("CACHEBLEND_REMOTE")
    assert world.error("store", "push", code=2)["hint"] == "give its address with --remote"


def test_run_reads_a_chunk_from_memory_the_second_time(world: World) -> None:
    world.json("ingest", "docs")
    lines = '{"question": "Who keeps the log?"}\n' * 3
    result = world("run", "-", "--memory-limit", "100MB", input=lines)
    assert result.exit_code == 0, result.output
    tiers = [json.loads(line)["kv"]["tiers"] for line in result.stdout.splitlines()]
    assert set(tiers[0]) == {"disk"}
    assert "memory" in tiers[2]
    assert len({sum(tier.values()) for tier in tiers}) == 1
