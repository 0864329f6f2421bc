"""`cacheblend store`, as its user sees it. No model is needed for any of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cache_store.catalog import ChunkText
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, SPEC, files, flip, make_layers, put
from tests.cbcli.terminal import run

TEXTS = {
    "notes/plan.md": ["# Plan\n\nShip in May.", "Then rest.", "Shared words."],
    "ideas.txt": ["Shared words.", "Fish \x1b[2J[/bold] and chips"],
}


@dataclass(frozen=True)
class Filled:
    """A store with two documents; one chunk of the second isn't cached."""

    path: Path

    def __call__(self, *args: str, input: str | None = None) -> Result:
        return run("store", *args, "--store", str(self.path), input=input)

    def json(self, *args: str, code: int = 0) -> Any:
        result = self(*args, "--json")
        assert result.exit_code == code, result.stderr
        return json.loads(result.stdout)

    def error(self, *args: str, code: int) -> dict[str, str]:
        result = self(*args, "--json")
        assert result.exit_code == code, result.output
        (line,) = result.stderr.splitlines()
        error: dict[str, str] = json.loads(line)["error"]
        return error

    def opened(self) -> ChunkStore:
        return ChunkStore.open(self.path)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Filled:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "store"
    with ChunkStore.open(path, limit_bytes=2**26) as store:
        store.catalog.name_model(SPEC.model, "tiny")
        for source, texts in TEXTS.items():
            chunks = [ChunkText(chunk_id(t), t, 0, len(t), 3) for t in texts]
            store.catalog.replace_document(source, "d", '{"chunk_tokens":9}', chunks)
        for number, text in enumerate({t: 0 for texts in TEXTS.values() for t in texts}):
            if "Fish" not in text:
                put(store, (number, 1, 1), chunk_id=chunk_id(text))
        put(store, (8, 8), ())  # the prefix, which is no chunk
    return Filled(path)


def ids(*texts: str) -> list[str]:
    return [chunk_id(text) for text in texts]


PLAN, REST, SHARED = ids(*TEXTS["notes/plan.md"])
FISH = chunk_id(TEXTS["ideas.txt"][1])


def test_ls_shows_every_chunk_of_every_document(store: Filled) -> None:
    listed = store("ls")
    assert listed.exit_code == 0
    header, *rows = listed.stdout.splitlines()
    assert header.split() == [
        "chunk",
        "source",
        "tokens",
        "size",
        "model",
        "dtype",
        "cached",
        "behind",
        "usable",
        "text",
    ]
    assert [row.split()[0] for row in rows] == [i[:12] for i in (PLAN, REST, SHARED, SHARED, FISH)]
    assert [row.split()[1] for row in rows] == ["notes/plan.md"] * 3 + ["ideas.txt"] * 2
    assert ["tiny" in row and "yes" in row for row in rows] == [True] * 4 + [False]
    assert " no " in rows[-1]
    assert "2 documents, 5 chunks, 4 cached; 1 entry of no chunk here" in listed.stderr


def test_ls_shows_documents(store: Filled) -> None:
    _, plan, ideas = store("ls", "--documents").stdout.splitlines()
    assert plan.split()[:6] == ["notes/plan.md", "3", "3", "9", "12.3", "kB"]
    assert ideas.split()[:3] == ["ideas.txt", "2", "1"]


def test_ls_as_json_has_all_of_it_as_raw_values(store: Filled) -> None:
    listing = store.json("ls")
    assert listing["store"] == str(store.path)
    assert [d["source"] for d in listing["documents"]] == list(TEXTS)
    assert listing["documents"][0]["settings"] == {"chunk_tokens": 9}
    plan = listing["chunks"][0]
    assert (plan["chunk_id"], plan["source"], plan["ordinal"]) == (PLAN, "notes/plan.md", 0)
    assert (plan["cached"], plan["tokens"], plan["bytes"]) == (True, 3, 4096)
    assert plan["entries"][0]["model"] == {"name": "tiny", "fingerprint": SPEC.model}
    assert (plan["entries"][0]["dtype"], plan["entries"][0]["context_tokens"]) == ("fp32", 3)
    assert listing["chunks"][-1]["cached"] is False
    assert listing["chunks"][-1]["entries"] == []
    assert [entry["tokens"] for entry in listing["other_entries"]] == [2]


def test_a_chunk_of_two_models_has_a_line_for_each(store: Filled) -> None:
    with store.opened() as opened:
        put(opened, (1, 2, 3), spec=replace(SPEC, model="f" * 64), chunk_id=FISH)
        put(opened, (1, 2, 3), chunk_id=FISH)
    rows = [line for line in store("ls").stdout.splitlines() if line.startswith(FISH[:12])]
    assert [row.split()[5] for row in rows] == ["ffffffffffff", "tiny"]
    models = [entry["model"]["name"] for entry in store.json("show", FISH)["entries"]]
    assert sorted(models, key=str) == [None, "tiny"]


def test_show_gives_the_text_and_where_it_is(store: Filled) -> None:
    shown = store("show", SHARED[:8].upper())
    assert shown.exit_code == 0
    for said in (SHARED, "notes/plan.md, chunk 2", "ideas.txt, chunk 0", "for tiny (fp32)"):
        assert said in shown.stdout
    assert shown.stdout.endswith("\n\nShared words.\n")
    described = store.json("show", SHARED)
    assert described["text"] == "Shared words."
    assert [place["source"] for place in described["places"]] == list(TEXTS)
    assert "cached  no" in store("show", FISH).stdout


@pytest.mark.parametrize("args", [("ls",), ("show", FISH)])
def test_documents_never_drive_the_terminal(store: Filled, args: tuple[str, ...]) -> None:
    printed = store(*args).stdout
    assert "\x1b" not in printed
    assert "␛[2J[/bold] and chips" in printed
    assert store.json("show", FISH)["text"] == TEXTS["ideas.txt"][1]


def test_unknown_and_ambiguous_ids(store: Filled) -> None:
    for command in ("show", "rm"):
        error = store.error(command, "0000000000", code=3)
        assert error["kind"] == "not_found"
        assert "store ls" in error["hint"]
        assert store.error(command, "abc", code=2)["kind"] == "usage"
    with store.opened() as opened:
        twins = [ChunkText("abcd" + c * 60, c, 0, 1, 1) for c in "01"]
        opened.catalog.replace_document("twins", "d", "{}", twins)
    assert "beginning of 2 chunk ids" in store.error("show", "abcd", code=2)["message"]


def test_rm_of_a_chunk_takes_its_kv_and_leaves_its_text(store: Filled) -> None:
    removed = store("rm", PLAN[:12], REST)
    assert removed.exit_code == 0
    assert removed.stdout == "removed 2 entries, 8.2 kB freed\n"
    cached = {c["chunk_id"]: c["cached"] for c in store.json("ls")["chunks"]}
    assert (cached[PLAN], cached[REST], cached[SHARED]) == (False, False, True)
    assert store.json("rm", PLAN)["bytes_freed"] == 0


def test_rm_of_a_document_leaves_what_others_need(store: Filled) -> None:
    removed = store.json("rm", "--document", "./notes/../notes/plan.md")
    assert removed == {
        "documents": ["notes/plan.md"],
        "entries": 2,
        "bytes_freed": 8192,
        "dry_run": False,
    }
    listing = store.json("ls")
    assert [d["source"] for d in listing["documents"]] == ["ideas.txt"]
    assert [c["cached"] for c in listing["chunks"]] == [True, False]
    error = store.error("rm", "--document", "idea.txt", code=3)
    assert "did you mean 'ideas.txt'?" in error["hint"]


def test_rm_of_all_documents_leaves_nothing_shared(store: Filled) -> None:
    removed = store.json("rm", "--document", "ideas.txt", "--document", "notes/plan.md")
    assert removed["entries"] == 3
    assert store.json("ls")["documents"] == []
    assert store.json("stats")["entries"] == 1  # the prefix


def test_rm_all_asks_first(store: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    error = store.error("rm", "--all", code=2)
    assert "--yes" in error["hint"]
    assert len(store.json("ls")["documents"]) == 2

    monkeypatch.setattr("cbcli.store_access.is_interactive", lambda: True)
    assert store("rm", "--all", input="n\n").exit_code == 1
    assert len(store.json("ls")["documents"]) == 2
    asked = store("rm", "--all", input="y\n")
    assert asked.exit_code == 0
    assert "Remove 2 documents and 4 stored entries?" in asked.stderr
    assert asked.stdout.endswith("removed 2 documents and 4 entries, 16.4 kB freed\n")
    assert store.json("ls")["chunks"] == []


def test_rm_all_yes(store: Filled) -> None:
    removed = store.json("rm", "--all", "--yes")
    assert (len(removed["documents"]), removed["entries"]) == (2, 4)
    assert store.json("verify")["checked"] == 0


@pytest.mark.parametrize("args", [(PLAN,), ("--document", "ideas.txt"), ("--all",)])
def test_a_dry_run_says_it_all_and_removes_nothing(store: Filled, args: tuple[str, ...]) -> None:
    before = store.json("ls")
    would = store.json("rm", *args, "--dry-run")
    assert store("rm", *args, "--dry-run").stdout.startswith("would remove ")
    assert store.json("ls") == before
    did = store.json("rm", *args, "--yes")
    assert {**would, "dry_run": False} == did


def test_rm_wants_to_know_what(store: Filled) -> None:
    for args in ((), (PLAN, "--all"), ("--all", "--document", "ideas.txt"), ("--all", PLAN)):
        assert store.error("rm", *args, code=2)["message"] == "say what to remove"


def test_stats(store: Filled) -> None:
    found = store.json("stats")
    assert (found["documents"], found["document_chunks"], found["entries"]) == (2, 5, 4)
    (model,) = found["models"]
    assert (found["limit"], model["name"], model["dtype"]) == (2**26, "tiny", SPEC.dtype)
    assert (model["fingerprint"], model["nbytes"]) == (SPEC.model, found["entry_bytes"])
    assert isinstance(found["used"], int)
    shown = store("stats").stdout
    for said in (str(store.path), "of 67.1 MB", "5, 15 tokens", "4, 11 tokens", "tiny"):
        assert said in shown


def test_verify_says_what_is_wrong_and_puts_it_right(store: Filled) -> None:
    sound = store("verify")
    assert (sound.exit_code, sound.stdout) == (0, "4 entries checked, 4 sound\n")
    with store.opened() as opened:
        damaged = files(opened)[0]
    flip(damaged, -1)
    found = store("verify")
    assert found.exit_code == 4
    assert f"entry {damaged.name[:12]}" in found.stdout
    assert "4 entries checked, 3 sound, 1 problem\n" in found.stdout
    assert "verify --repair" in found.stderr
    described = store("verify", "--json")
    assert described.exit_code == 4
    report = json.loads(described.stdout)
    assert (report["checked"], report["ok"], report["repaired"]) == (4, 3, 0)
    assert report["problems"][0]["where"] == damaged.name.split(".")[0]
    assert json.loads(described.stderr)["error"]["kind"] == "integrity"
    repaired = store("verify", "--repair")
    assert repaired.exit_code == 0
    assert "1 problem, 1 repaired" in repaired.stdout
    assert store("verify").exit_code == 0


@pytest.mark.parametrize("command", [("rm", "--all", "--yes"), ("prune", "--unused-for", "0s")])
def test_a_full_disk_can_be_freed(
    store: Filled, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbcli.store_access.free_bytes", lambda folder: 0)
    assert store(*command, "--dry-run").exit_code == 0
    assert store("verify").stdout == "4 entries checked, 4 sound\n"  # nothing went for that
    done = store(*command)
    assert done.exit_code == 0
    assert "the disk is full: 4 entries went first" in done.stderr
    assert store("verify").stdout == "0 entries checked, 0 sound\n"


def test_verify_of_altered_text_says_that_ingest_cures_it(store: Filled) -> None:
    with store.opened() as opened, opened.catalog.writing() as db:
        db.execute("UPDATE chunk SET text = 'other' WHERE chunk_id = ?", (PLAN,))
    for repair in ((), ("--repair",)):
        found = store("verify", *repair)
        assert found.exit_code == 4
        assert "ingest the documents" in found.stderr
        assert "--repair" not in found.stderr


def test_what_cannot_be_repaired_stays_an_error(store: Filled) -> None:
    (store.path / "kv" / "folder").mkdir()
    assert store("verify", "--repair").exit_code == 4


def test_a_damaged_index_is_one_line_and_exit_4(store: Filled) -> None:
    for end in ("-wal", "-shm"):
        (store.path / "kv" / f"cache.db{end}").unlink(missing_ok=True)
    (store.path / "kv" / "cache.db").write_bytes(b"no database" * 1000)
    for args in (("ls",), ("stats",), ("limit", "1GB")):
        error = store.error(*args, code=4)
        assert "cache.db is damaged" in error["message"]
        assert error["hint"]
    found = store.json("verify", code=4)
    assert [problem["where"] for problem in found["problems"]] == ["kv/cache.db"]
    found = store.json("verify", "--repair")
    assert "made anew from" in found["problems"][0]["what"]
    assert found["ok"] == found["checked"] > 0
    assert store.json("verify")["problems"] == []


def test_path_needs_no_store(tmp_path: Path) -> None:
    nowhere = Filled(tmp_path / "nowhere")
    assert nowhere("path").stdout == f"{tmp_path / 'nowhere'}\n"
    assert nowhere.json("path") == {"path": str(tmp_path / "nowhere"), "exists": False}
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "args", [("ls",), ("show", PLAN), ("rm", PLAN), ("stats",), ("verify",), ("limit",)]
)
def test_where_there_is_no_store_none_is_made(tmp_path: Path, args: tuple[str, ...]) -> None:
    nowhere = Filled(tmp_path / "nowhere")
    error = nowhere.error(*args, code=3)
    assert "no store" in error["message"]
    assert "ingest" in error["hint"]
    assert not (tmp_path / "nowhere").exists()


def test_the_limit_is_shown_and_set(store: Filled) -> None:
    assert store("limit").stdout.startswith("67.1 MB (67108864 bytes), ")
    assert store.json("limit", "50MB")["limit"] == 50_000_000
    assert store.json("limit")["limit"] == 50_000_000
    for wrong in ("many", "-1", "1kB", "0"):
        assert store("limit", "--", wrong).exit_code == 2
    assert store.error("limit", "lots", code=2)["hint"].startswith("expected a size")
    assert store.json("limit")["limit"] == 50_000_000


def test_a_smaller_limit_says_what_it_cost(store: Filled) -> None:
    with store.opened() as opened:
        layers = make_layers(BIG, 32)
        for number in range(8):
            opened.put(BIG, [number] * 32, (), "", layers)
    set_to = store.json("limit", "5MB")
    assert set_to["used"] <= 5_000_000
    assert set_to["entries_evicted"] > 5


def test_the_order_of_eviction_is_shown_and_set(store: Filled) -> None:
    assert store("limit").stdout.rstrip().endswith("(lru)")
    assert store.json("limit")["eviction"] == store.json("stats")["eviction"] == "lru"
    assert store.json("limit", "--eviction", "lfu")["eviction"] == "lfu"
    assert store.json("limit", "50MB", "--eviction", "none") == {
        "limit": 50_000_000,
        "used": store.json("stats")["used"],
        "eviction": "none",
        "entries_evicted": 0,
    }
    assert "evicts nothing" in store("limit").stdout
    assert "lru, lfu, none" in store.error("limit", "--eviction", "fifo", code=2)["hint"]
    assert store.json("limit")["eviction"] == "none"


def test_documents_are_pinned_and_unpinned(store: Filled) -> None:
    assert store.json("pin", "ideas.txt") == {
        "documents": ["ideas.txt"],
        "changed": 1,
        "pinned": ["ideas.txt"],
    }
    assert "pinned 1 document, 1 was already; 2 pinned in all" in store("pin", "--all").stdout
    assert store.json("stats")["pinned_documents"] == 2
    assert store.json("unpin", "notes/plan.md")["pinned"] == ["ideas.txt"]
    listed = store.json("ls", "--documents")["documents"]
    sizes = {c["chunk_id"]: c["bytes"] for c in store.json("ls")["chunks"] if "plan" in c["source"]}
    plan = next(d for d in listed if "plan" in d["source"])
    assert (plan["cached"], plan["bytes"]) == (len(sizes), sum(sizes.values()))
    assert "chunks" not in store.json("ls", "--documents")
    assert {d["source"]: d["pinned"] for d in listed} == {"notes/plan.md": False, "ideas.txt": True}
    (row,) = [line for line in store("ls", "--documents").stdout.splitlines() if "ideas" in line]
    assert " yes " in row
    assert store.json("unpin", "--all")["pinned"] == []
    assert store.error("pin", code=2)["hint"]
    assert store.error("pin", "ideas.txt", "--all", code=2)["hint"]
    assert "ideas.txt" in store.error("pin", "idea.txt", code=3)["hint"]


def test_rm_leaves_what_is_in_use_and_says_so(store: Filled) -> None:
    with store.opened() as opened, opened.open_entry(opened.keys_of_chunk(PLAN)[0]):
        result = store("rm", PLAN)
        assert result.exit_code == 0
        assert "in use and not removed: 1 entry" in result.stderr
        assert opened.keys_of_chunk(PLAN)
    assert "removed 1 entry" in store("rm", PLAN).stdout


def test_a_limit_can_be_set_before_there_is_a_store(tmp_path: Path) -> None:
    new = Filled(tmp_path / "new")
    assert new.json("limit", "30MB")["limit"] == 30_000_000
    assert new.json("stats")["entries"] == 0


def test_looking_changes_nothing(store: Filled) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_size)
            for path in store.path.rglob("*")
            if not path.name.endswith("-shm")  # a reader's lock on the log
        }

    store("ls")
    before = state()
    for args in (("ls",), ("show", PLAN), ("stats",), ("verify",), ("limit",), ("path",)):
        assert store(*args).exit_code == 0
    assert state() == before


def test_nothing_is_removed_where_nothing_can_be_written(
    store: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.store.is_writable", lambda folder: False)
    for args in (("rm", PLAN), ("rm", "--all", "--yes"), ("verify", "--repair"), ("limit", "1GB")):
        assert "reading only" in store.error(*args, code=2)["message"]
    assert store.json("stats")["entries"] == 4


def test_the_store_of_the_settings_is_used(store: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_STORE", str(store.path))
    assert run("store", "path").stdout == f"{store.path}\n"
    assert len(json.loads(run("store", "ls", "--json").stdout)["chunks"]) == 5


def test_sources_are_shown_as_seen_from_here(store: Filled, tmp_path: Path) -> None:
    absolute = tmp_path / "docs" / "far.md"
    with store.opened() as opened:
        opened.catalog.replace_document(
            str(absolute), "d", "{}", [ChunkText(chunk_id("far"), "far", 0, 3, 1)]
        )
    assert "docs/far.md" in store("ls", "--documents").stdout.split()
    assert store.json("ls")["documents"][-1]["source"] == str(absolute)
    assert store.json("rm", "--document", "docs/far.md")["documents"] == [str(absolute)]


def test_quiet_says_nothing_besides_the_data(store: Filled) -> None:
    assert store("ls", "-q").stderr == ""
    assert store("verify", "-q").stderr == ""


@pytest.mark.parametrize(
    "command", ["ls", "show", "rm", "stats", "verify", "path", "limit", "pin", "unpin"]
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = run("store", command, "--help")
    assert shown.exit_code == 0
    assert "Example" in shown.stdout
    assert "--json" in shown.stdout
    assert command in run("store", "--help").stdout


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, cbcli.commands.store;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
