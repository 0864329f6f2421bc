"""What `store ls` and `store show` choose, and what they and `stats` say of other settings."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cbcli.world import World, add_model, make_world

QUESTION = "When does the tide turn?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    assert world("ingest", "docs", "--chunk-tokens", "16").exit_code == 0
    return world


def uses(world: World, *args: str, model: str = "tiny") -> set[str]:
    chunks = world.json("store", "ls", *args, model=model)["chunks"]
    return {entry["usable"] for chunk in chunks for entry in chunk["entries"]}


def counted(world: World) -> dict[str, int]:
    found: dict[str, int] = world.json("store", "stats")["counters"]
    return found


def misses(result: dict[str, object]) -> list[str | None]:
    segments = result["prompt"]["segments"]  # type: ignore[index]
    return [s["reason"] for s in segments if s["status"] == "miss"]


def test_ls_chooses_by_source_pattern_text_and_id(world: World) -> None:
    everything = world.chunks()

    def found(text: str) -> list[dict[str, object]]:
        listed: list[dict[str, object]] = world.json("store", "ls", "--filter", text)["chunks"]
        return listed

    tides = found("docs/*.md")
    assert tides
    assert {Path(str(c["source"])).name for c in tides} == {"one.md"}
    assert found("TWO.txt") == [c for c in everything if c["source"].endswith("two.txt")]
    silver = found("SILVER")
    assert len(silver) == 1
    assert found(str(silver[0]["chunk_id"])[:10]) == silver
    assert found("no such words") == []
    sources = {d["source"] for d in world.json("store", "ls", "--filter", "one.md")["documents"]}
    assert {Path(source).name for source in sources} == {"one.md"}


def test_ls_sorts_limits_and_tells_cached_from_missing(world: World) -> None:
    chunks = world.chunks()
    sizes = [c["bytes"] for c in world.json("store", "ls", "--sort", "size")["chunks"]]
    assert sizes == sorted((c["bytes"] for c in chunks), reverse=True)
    assert len(world.json("store", "ls", "--sort", "tokens", "--limit", "2")["chunks"]) == 2
    gone = chunks[-1]["chunk_id"]
    assert world("store", "rm", gone).exit_code == 0
    missing = world.json("store", "ls", "--missing")["chunks"]
    assert [c["chunk_id"] for c in missing] == [gone]
    assert len(world.json("store", "ls", "--cached")["chunks"]) == len(chunks) - 1
    first = world("store", "ls", "--documents", "--sort", "size", "--limit", "1").stdout
    assert "docs/one.md" in first.splitlines()[1]
    assert len(first.splitlines()) == 2
    assert "did you mean size" in world.error("store", "ls", "--sort", "siz", code=2)["hint"]


def test_hits_sort_what_was_asked_for_first(world: World) -> None:
    wanted = world.chunks()[3]["chunk_id"]
    assert world("ask", "--chunk", wanted, QUESTION).exit_code == 0
    for order in ("hits", "used"):
        listed = world.json("store", "ls", "--sort", order, "--limit", "1")["chunks"]
        assert [c["chunk_id"] for c in listed] == [wanted]


def test_ls_says_what_the_present_settings_can_use(world: World) -> None:
    assert uses(world) == {"yes"}
    add_model(world.root, "second", seed=1)
    assert uses(world, model="second") == {None}  # never used: not known, and not guessed
    assert "not known until second" in world("store", "ls", model="second").stderr
    assert world("ingest", "docs", "--chunk-tokens", "16", model="second").exit_code == 0
    assert uses(world, model="second") == {"yes", "other model"}
    assert world("ask", QUESTION, "--system", "Be kind.").exit_code == 0
    (world.root / "cacheblend.toml").write_text('system = "Be kind."\n')
    assert {"other prefix", "other model"} <= uses(world)
    listed = world("store", "ls").stdout
    assert "other prefix" in listed
    chunk = world.chunks()[0]["chunk_id"]
    shown = world("store", "show", chunk).stdout
    assert "usable, other prefix" in shown
    assert "not usable, other model" in shown


def test_other_weights_under_the_same_name_are_another_model(world: World) -> None:
    shutil.rmtree(world.root / "home/models/tiny")
    add_model(world.root, "tiny", seed=7)
    assert uses(world) == {None}
    error = world.error("ask", QUESTION, code=3)
    assert "ingested with" in error["message"]
    assert uses(world) == {"other model"}


def test_misses_are_counted_with_their_reasons_and_said(world: World) -> None:
    first, second, *_ = [c["chunk_id"] for c in world.chunks()]
    asked = ("ask", QUESTION, "--chunk", first, "--chunk", second, "--no-save")
    assert misses(world.json(*asked)) == []
    assert counted(world) == {"hit.exact": 1, "hit.other_context": 1}
    world("store", "rm", second)
    result = world(*asked, "--json")
    assert misses(json.loads(result.stdout)) == ["evicted"]
    assert "1 chunk is no longer stored" in result.stderr
    assert counted(world) == {"hit.exact": 2, "hit.other_context": 1, "miss.evicted": 1}
    shown = world("store", "stats").stdout
    assert "missed" in shown
    assert "1 evicted or removed" in shown


def test_a_chunk_of_another_dtype_misses_for_that_reason(world: World) -> None:
    first, second, *_ = [c["chunk_id"] for c in world.chunks()]
    asked = ("ask", QUESTION, "--chunk", first, "--chunk", second, "--no-save", "--dtype", "bf16")
    world("ask", QUESTION, "--chunk", first, "--dtype", "bf16", "--mode", "full", "--save")
    alone = world(*asked, "--json")
    assert misses(json.loads(alone.stdout)) == ["other_model", "other_model"]
    assert "stored as fp32, not as bf16" in alone.stderr
    assert "stored for another model" not in alone.stderr  # it is said once
    note = world.root / "note.md"
    note.write_text("A note on knots and nothing else at all.\n")
    assert world("ingest", str(note), "--dtype", "bf16").exit_code == 0
    knots = next(c["chunk_id"] for c in world.chunks() if "note.md" in c["source"])
    mixed = world(*asked, "--chunk", knots, "--json")
    assert misses(json.loads(mixed.stdout)) == ["other_model", "other_model"]
    assert "2 chunks are stored for another model, tokenizer or KV dtype" in mixed.stderr


def test_strict_context_and_damage_are_reasons(world: World) -> None:
    first, second, *_ = [c["chunk_id"] for c in world.chunks()]
    asked = ("ask", QUESTION, "--chunk", first, "--chunk", second, "--no-save")
    other = world(*asked, "--system", "Be kind.", "--strict-context", "--json")
    assert misses(json.loads(other.stdout)) == ["context", "context"]
    assert "--strict-context refuses" in other.stderr
    loose = world.json(*asked, "--system", "Be kind.")
    assert [s["status"] for s in loose["prompt"]["segments"] if s["kind"] == "chunk"] == [
        "hit",
        "hit",
    ]
    key = world.json("store", "show", second)["entries"][0]["key"]
    (file,) = (world.root / "home/store/kv").glob(f"{key}.*.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert misses(world.json(*asked)) == ["damaged"]
    file.unlink(missing_ok=True)
    assert counted(world)["miss.damaged"] == 1


def test_a_chunk_of_no_document_was_never_stored(world: World) -> None:
    line = {"question": QUESTION, "chunks": [{"text": "Entirely new words."}]}
    (world.root / "in.jsonl").write_text(json.dumps(line) + "\n")
    result = world("run", "in.jsonl")
    assert result.exit_code == 0, result.stderr
    assert misses(json.loads(result.stdout)) == ["absent"]
    assert counted(world)["miss.absent"] == 1
    again = world("run", "in.jsonl")
    assert misses(json.loads(again.stdout)) == []


def test_show_gives_the_tokens_as_the_model_cuts_them(world: World) -> None:
    chunk = world.chunks()[0]
    shown = world.json("store", "show", chunk["chunk_id"], "--tokens")
    assert len(shown["token_ids"]) == chunk["tokens"]
    assert "".join(shown["token_texts"]) == shown["text"]
    table = world("store", "show", chunk["chunk_id"], "--tokens").stdout
    assert "place" in table
    assert str(shown["token_ids"][0]) in table
