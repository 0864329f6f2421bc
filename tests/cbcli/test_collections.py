"""Collections, as their user sees them: made, listed, chosen from, forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.catalog import ChunkText
from cache_store.errors import NotFoundError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from cbcli.chooser import Chooser
from cbcli.settings import load_settings
from tests.cache_store.support import put
from tests.cbcli.terminal import run
from tests.cbcli.world import World, make_world

TEXTS = {
    "plan.md": ["Ship in May.", "Shared words."],
    "ideas.txt": ["Shared words.", "Fish and chips"],
    "old.txt": ["Ship in March."],
}
PLAN, SHARED = map(chunk_id, TEXTS["plan.md"])


Says = Callable[..., Any]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in which plan.md is in `work` and `all`, ideas.txt in `all`."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "store"
    with ChunkStore.open(path, limit_bytes=2**26) as store:
        for source, texts in TEXTS.items():
            chunks = [ChunkText(chunk_id(t), t, 0, len(t), 3) for t in texts]
            store.catalog.replace_document(source, "d", "{}", chunks)
        for number, text in enumerate({t: 0 for texts in TEXTS.values() for t in texts}):
            put(store, (number, 1, 1), chunk_id=chunk_id(text))
        store.catalog.collect("work", ["plan.md"])
        store.catalog.collect("all", ["plan.md", "ideas.txt"])
    return path


@pytest.fixture
def says(path: Path) -> Says:
    """The JSON of a command over that store, or its error."""

    def say(*args: str, code: int = 0) -> Any:
        result = run(*args, "--store", str(path), "--json")
        assert result.exit_code == code, result.output
        if code:
            return json.loads(result.stderr)["error"]
        return json.loads(result.stdout)

    return say


def test_collections_are_listed_with_what_is_in_them(says: Says) -> None:
    assert says("store", "collections")["collections"] == [
        {"name": "all", "documents": 2, "chunks": 4, "tokens": 12},
        {"name": "work", "documents": 1, "chunks": 2, "tokens": 6},
    ]


def test_the_list_is_a_table_or_names_and_changes_take_their_own_flags(path: Path) -> None:
    def printed(*args: str) -> str:
        return run("store", "collections", "--store", str(path), *args).stdout

    assert printed().splitlines()[0].split() == ["collection", "documents", "chunks", "tokens"]
    assert printed("-q").split() == ["all", "work"]
    assert printed("--jsonl", "--fields", "name").splitlines()[1] == '{"name": "work"}'
    before = run("store", "collections", "--json", "rm", "work")
    assert (before.exit_code, before.stdout) == (2, "")


def test_documents_are_put_into_one_and_taken_out(says: Says) -> None:
    found = says("store", "collections", "add", "new/2026", "old.txt", "plan.md")
    assert found == {"collection": "new/2026", "changed": 2, "documents": 2}
    again = says("store", "collections", "add", "new/2026", "old.txt")
    assert again == {"collection": "new/2026", "changed": 0, "documents": 2}
    found = says("store", "collections", "remove", "new/2026", "plan.md", "ideas.txt")
    assert found == {"collection": "new/2026", "changed": 1, "documents": 1}
    listed = says("store", "ls", "--documents", "--collection", "new/2026")["documents"]
    assert [document["source"] for document in listed] == ["old.txt"]


def test_a_forgotten_collection_leaves_its_documents(says: Says) -> None:
    assert says("store", "collections", "rm", "all")["changed"] == 2
    assert [c["name"] for c in says("store", "collections")["collections"]] == ["work"]
    assert len(says("store", "ls", "--documents")["documents"]) == 3


@pytest.mark.parametrize(
    "args",
    [
        ("store", "ls", "--collection", "wrok"),
        ("store", "rm", "--yes", "--collection", "wrok"),
        ("store", "pin", "--collection", "wrok"),
        ("store", "unpin", "--collection", "wrok"),
        ("store", "prune", "--collection", "wrok"),
        ("store", "warm", "--collection", "wrok"),
        ("store", "export", "x.tar", "--collection", "wrok"),
        ("store", "collections", "rm", "wrok"),
        ("store", "collections", "remove", "wrok", "plan.md"),
        ("ask", "Ship?", "--collection", "wrok"),
    ],
)
def test_an_unknown_collection_is_named_with_the_nearest(says: Says, args: tuple[str, ...]) -> None:
    error = says(*args, code=3)
    assert (error["message"], error["hint"]) == (
        "no collection 'wrok' in the store",
        "did you mean 'work'?",
    )


@pytest.mark.parametrize("name", ["two words", "", "a,b", "é", "x" * 81, "a\nb"])
def test_names_of_other_characters_are_refused(says: Says, name: str) -> None:
    error = says("store", "collections", "add", name, "plan.md", code=2)
    assert "is no name of a collection" in error["message"]
    assert len(says("store", "collections")["collections"]) == 2


def test_what_is_listed_removed_and_pinned_is_the_collections(says: Says) -> None:
    listed = says("store", "ls", "--collection", "work", "--collection", "all")["chunks"]
    assert [c["source"] for c in listed] == ["plan.md", "plan.md", "ideas.txt", "ideas.txt"]
    pinned = says("store", "pin", "old.txt", "--collection", "work")
    assert pinned["documents"] == ["old.txt", "plan.md"]
    assert says("store", "unpin", "--collection", "work")["changed"] == 1
    plan = says("store", "rm", "--dry-run", "--collection", "work")
    assert (plan["documents"], plan["entries"]) == (["plan.md"], 1)  # the other is ideas.txt's too
    says("store", "rm", "--collection", "work", code=2)  # nobody is there to be asked
    assert says("store", "rm", "--yes", "--collection", "work")["documents"] == ["plan.md"]
    assert [c["name"] for c in says("store", "collections")["collections"]] == ["all"]


def test_prune_takes_only_the_collections_own_chunks(says: Says, path: Path) -> None:
    assert says("store", "prune", "--collection", "work", "--dry-run")["entries"] == 1
    assert says("store", "prune", "--collection", "work", "--unused-for", "1d")["entries"] == 0
    assert says("store", "prune", "--collection", "all")["entries"] == 3
    with ChunkStore.open(path) as store:
        assert [e.chunk_id for e in store.entries()] == [chunk_id("Ship in March.")]


def test_questions_look_in_the_collections_set(path: Path) -> None:
    with ChunkStore.open(path) as store:
        chooser = Chooser(store)

        def sources(*names: str) -> list[str]:
            settings = load_settings({"collections": list(names)}, env={})
            return [c.source for c in chooser.choose(settings, "When do we ship?", ())]

        assert sources() == ["plan.md", "old.txt"]
        assert sources("work") == ["plan.md"]
        assert sources("work", "all") == ["plan.md"]
        store.catalog.collect("work", ["old.txt"])
        assert sources("work") == ["plan.md", "old.txt"]
        assert sources("") == ["plan.md", "old.txt"]
        with pytest.raises(NotFoundError, match="no collection 'wor'"):
            sources("wor")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        return make_world(tmp_path_factory.mktemp("world"), patch)


def test_ingested_documents_come_into_collections_unchanged_ones_too(world: World) -> None:
    def known() -> dict[str, list[str]]:
        with ChunkStore.open(world.root / "home" / "store", read_only=True) as store:
            found = store.catalog.collections().items()
            return {name: [Path(s).name for s in sources] for name, sources in found}

    docs = world.docs
    world.json("ingest", str(docs / "one.md"), "--collection", "tides")
    assert known() == {"tides": ["one.md"]}
    world.json("ingest", str(docs / "one.md"), str(docs / "two.txt"), "--collection", "a,b")
    assert known() == {"a": ["one.md", "two.txt"], "b": ["one.md", "two.txt"], "tides": ["one.md"]}
    (docs / "one.md").write_text("The tide turns twice.\n")
    world.json("ingest", str(docs / "one.md"))
    assert known()["tides"] == ["one.md"]  # a changed one stays
    bad = world.error("ingest", str(docs), "--collection", "no good", code=2)
    assert "--collection" in bad["message"]
    line = '{"question": "Who keeps the lamp of the lighthouse?", "collections": ["tides"]}\n'
    failed = world("run", "-", input=line)
    assert "no stored chunk has a word in common" in failed.stdout + failed.stderr
    exported = world.root / "some.tar"
    found = world.json("store", "export", str(exported), "--collection", "tides")
    assert found["documents"] == 1
