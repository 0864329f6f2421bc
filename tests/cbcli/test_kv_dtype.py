"""`--kv-dtype`, from ingest to answers and listings."""

from pathlib import Path

import pytest

from tests.cbcli.world import World, make_world

QUESTION = "Who keeps the log of every boat?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def statuses(result) -> set[str]:
    return {s["status"] for s in result["prompt"]["segments"] if s["kind"] == "chunk"}


def test_what_is_ingested_in_a_type_is_found_in_it_and_in_no_other(world: World) -> None:
    made = world.json("ingest", "docs", "--chunk-tokens", "24", "--kv-dtype", "int8")
    entries = [entry for chunk in world.chunks() for entry in chunk["entries"]]
    assert {entry["dtype"] for entry in entries} == {"int8"}
    assert "(int8)" in world("store", "show", world.chunks()[0]["chunk_id"]).stdout
    result = world.json("ask", QUESTION, "--kv-dtype", "int8", "--no-save")
    assert (result["model"]["dtype"], result["model"]["kv_dtype"]) == ("fp32", "int8")
    assert statuses(result) <= {"exact", "hit"}
    assert 0 < result["kv"]["bytes_loaded"] < made["bytes_written"]
    other = world("ask", QUESTION, "--json", "--no-save")
    assert other.exit_code == 0
    assert "stored as int8, not as fp32" in other.stderr
    assert "--kv-dtype int8" in other.stderr
    plain = world.json("ask", QUESTION)  # and saves
    assert statuses(plain) == {"miss"}
    assert statuses(world.json("ask", QUESTION)) <= {"exact", "hit"}


def test_sizes_are_predicted_in_the_type(world: World) -> None:
    arguments = ("store", "estimate", "--tokens", "5000", "--no-probe")
    figures = {
        kind: world.json(*arguments, "--kv-dtype", kind)
        for kind in ("auto", "fp32", "int8", "int4")
    }
    assert figures["auto"] == figures["fp32"]
    sizes = [figures[kind]["material"]["bytes"] for kind in ("fp32", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert figures["int8"]["model"] == {"name": "tiny", "dtype": "fp32", "kv_dtype": "int8"} | {
        "device": figures["auto"]["model"]["device"]
    }
    dry = {
        kind: world.json("ingest", "docs", "--dry-run", "--kv-dtype", kind)["bytes"]
        for kind in ("auto", "int4")
    }
    assert dry["int4"] < dry["auto"]


def test_unknown_types_are_named(world: World) -> None:
    error = world.error("ask", QUESTION, "--kv-dtype", "int5", code=2)
    assert "int5" in error["message"]
    assert "int4" in error["hint"]
