"""A folder of every kind of document, and of every way they go wrong."""

from pathlib import Path

import pytest

from engine.documents import Document, find_files, read_documents
from tests.cbcli.world import World, make_world
from tests.engine.documents import awkward


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def test_every_file_of_an_awkward_folder_is_ingested_or_named(world: World) -> None:
    folder = world.root / "awkward"
    folder.mkdir()
    good = {**awkward.GOOD, **awkward.WRONG_NAME}
    empty = {**awkward.EMPTY, **awkward.BLANK}
    made = {**good, **{name: make for name, (make, _) in awkward.UNREADABLE.items()}}
    made |= {name: make for name, (make, _) in awkward.SKIPPED.items()}
    for name, make in made.items():
        (folder / name).write_bytes(make())
    for name, raw in empty.items():
        (folder / name).write_bytes(raw)
    (folder / "half.pdf").write_bytes(awkward.scan(3, text_on=2))

    told = world.json("ingest", "awkward", code=1)
    assert told["documents"] == {"new": len(good) + len(empty) + 1, "changed": 0, "unchanged": 0}
    names = {
        what: {Path(item["source"]).name: item for item in told[what]}
        for what in told
        if what in ("unreadable", "skipped", "notes")
    }
    assert set(names["unreadable"]) == set(awkward.UNREADABLE)
    assert set(names["skipped"]) == set(awkward.SKIPPED)
    assert {Path(source).name for source in told["empty"]} == set(empty)
    assert names["notes"]["half.pdf"]["note"] == "2 of 3 pages have no text"

    stored: dict[str, str] = {}
    for chunk in world.chunks():
        assert chunk["cached"]
        stored[chunk["source"]] = stored.get(chunk["source"], "") + chunk["text"] + "\n"
    assert {Path(source).name for source in stored} == {*good, "half.pdf"}
    for item in read_documents(find_files([folder])):
        if isinstance(item, Document) and item.text.strip():
            assert set(item.text.split()) <= set(stored[item.source].split()), item.source


def test_what_is_odd_about_a_file_is_said_when_it_is_new(world: World) -> None:
    folder = world.root / "odd"
    folder.mkdir()
    (folder / "half.pdf").write_bytes(awkward.scan(2, text_on=1))
    first = world("ingest", "odd")
    assert first.exit_code == 0
    assert "half.pdf: 1 of 2 pages has no text" in first.stderr
    assert "no text" not in world("ingest", "odd").stderr


def test_a_locked_file_named_by_hand_is_refused_and_the_rest_is_ingested(world: World) -> None:
    (world.root / "locked.pdf").write_bytes(awkward.pdf("secret", password="x"))
    (world.root / "pack.zip").write_bytes(awkward.archive({"a.txt": "text"}))
    result = world("ingest", "locked.pdf", "pack.zip", "docs")
    assert result.exit_code == 1
    assert "locked.pdf: is encrypted; save it without its password" in result.stderr
    assert "pack.zip: is an archive; unpack it" in result.stderr
    assert "3 documents" in result.stdout
