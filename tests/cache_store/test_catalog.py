import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store import schema
from cache_store.catalog import Catalog, ChunkText
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog.db", read_only=False)
    yield catalog
    catalog.close()


def cut(*texts: str) -> list[ChunkText]:
    chunks, start = [], 0
    for text in texts:
        chunks.append(ChunkText(chunk_id(text), text, start, start + len(text), len(text.split())))
        start += len(text)
    return chunks


def test_a_document_and_its_chunks_come_back_as_given(catalog: Catalog) -> None:
    catalog.replace_document("a.md", "digest", '{"chunk_tokens":9}', cut("one two ", "three\n"))
    document = catalog.document("a.md")
    assert document is not None
    assert (document.source, document.digest, document.settings) == (
        "a.md",
        "digest",
        '{"chunk_tokens":9}',
    )
    assert (document.chunks, document.tokens) == (2, 3)
    first, second = catalog.chunks("a.md")
    assert (first.text, first.ordinal, first.start, first.end) == ("one two ", 0, 0, 8)
    assert (second.text, second.ordinal, second.start, second.end) == ("three\n", 1, 8, 14)
    assert (first.tokens, first.source) == (2, "a.md")
    assert first.chunk_id == chunk_id("one two ")


def test_replacing_leaves_nothing_of_the_old(catalog: Catalog) -> None:
    catalog.replace_document("a", "1", "{}", cut("one", "two", "three"))
    catalog.replace_document("b", "1", "{}", cut("other"))
    catalog.replace_document("a", "2", "{}", cut("new"))
    assert [chunk.text for chunk in catalog.chunks()] == ["new", "other"]  # and keeps its place
    document = catalog.document("a")
    assert document is not None
    assert (document.digest, document.chunks) == ("2", 1)
    with pytest.raises(NotFoundError):
        catalog.chunk(chunk_id("two"))


def test_replacing_is_all_or_nothing(catalog: Catalog) -> None:
    catalog.replace_document("a", "1", "{}", cut("one", "two"))
    before = (catalog.documents(), catalog.chunks(), catalog.revision)
    broken = [*cut("new"), ChunkText("id", "text", None, 1, 1)]  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        catalog.replace_document("a", "2", "{}", broken)
    assert (catalog.documents(), catalog.chunks(), catalog.revision) == before
    catalog.replace_document("a", "3", "{}", cut("newer"))


def test_others_see_the_old_or_the_new_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    writer, reader = Catalog(path, read_only=False), Catalog(path, read_only=True)
    versions = [cut(*(f"{n} {i}" for i in range(n))) for n in (20, 30)]
    writer.replace_document("a", "0", "{}", versions[0])
    reader = Catalog(path, read_only=True)
    done = threading.Event()

    def write() -> None:
        for n in range(30):
            writer.replace_document("a", f"{n}", "{}", versions[n % 2])
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not done.is_set():
        chunks = reader.chunks("a")
        seen.add((len(chunks), len({chunk.text.split()[0] for chunk in chunks})))
    thread.join()
    assert seen <= {(20, 1), (30, 1)}
    writer.close()
    reader.close()


def test_documents_can_be_removed(catalog: Catalog) -> None:
    catalog.replace_document("a", "1", "{}", cut("one"))
    catalog.replace_document("b", "1", "{}", cut("two"))
    assert catalog.remove_document("a")
    assert not catalog.remove_document("a")
    assert catalog.document("a") is None
    assert [chunk.text for chunk in catalog.chunks()] == ["two"]
    assert catalog.chunks("a") == []


def test_empty_documents_are_documents(catalog: Catalog) -> None:
    catalog.replace_document("empty", "1", "{}", [])
    assert catalog.documents()[0].chunks == 0
    assert catalog.chunks("empty") == []


def test_ids_by_prefix(catalog: Catalog) -> None:
    texts = [f"text {n}" for n in range(300)]
    catalog.replace_document("a", "1", "{}", cut(*texts))
    ids = sorted(chunk_id(text) for text in texts)
    assert catalog.chunk(ids[0]).chunk_id == ids[0]
    assert catalog.chunk(ids[7][:16].upper()).chunk_id == ids[7]
    catalog.replace_document(
        "twins",
        "1",
        "{}",
        [ChunkText("abcd" + c * 60, c, 0, 1, 1) for c in "012345"],
    )
    with pytest.raises(UsageError, match=r"beginning of 6 chunk ids.* and 3 more"):
        catalog.chunk("abcd")
    assert catalog.chunk("abcd3").text == "3"
    for unknown in ("0000000000", "f" * 64):
        with pytest.raises(NotFoundError, match=unknown):
            catalog.chunk(unknown)
    for wrong in ("", "abc", "xyz1", "abcd%", "../a"):
        with pytest.raises(UsageError, match="not a chunk id"):
            catalog.chunk(wrong)


def test_the_same_text_in_several_places_is_one_chunk(catalog: Catalog) -> None:
    catalog.replace_document("b", "1", "{}", cut("same", "same"))
    catalog.replace_document("a", "1", "{}", cut("x", "same"))
    found = catalog.chunk(chunk_id("same")[:8])
    assert (found.source, found.ordinal) == ("b", 0)
    assert len(catalog.chunks()) == 4
    assert catalog.known_chunks([chunk_id("same"), chunk_id("no")]) == {chunk_id("same")}
    assert len(catalog.known_chunks(chunk_id(f"{n}") for n in range(3000))) == 0


def test_the_revision_changes_with_every_write(catalog: Catalog, tmp_path: Path) -> None:
    seen = [catalog.revision]
    for write in (
        lambda: catalog.replace_document("a", "1", "{}", cut("one")),
        lambda: catalog.replace_document("a", "1", "{}", cut("one")),
        lambda: catalog.remove_document("a"),
        lambda: catalog.name_model("f", "n"),
    ):
        write()
        seen.append(catalog.revision)
    assert len(set(seen)) == len(seen)
    other = Catalog(tmp_path / "catalog.db", read_only=True)
    assert other.revision == seen[-1]
    other.close()


def test_models_have_names(catalog: Catalog) -> None:
    assert catalog.model_name("f") is None
    catalog.name_model("f", "tiny")
    catalog.name_model("f", "tiny-2")
    catalog.name_model("g", "tiny-2")
    assert (catalog.model_name("f"), catalog.model_name("g")) == ("tiny-2", "tiny-2")


@settings(max_examples=30)
@given(
    st.text(st.characters(exclude_categories=())),
    st.lists(st.text(st.characters(exclude_categories=()))),
)
def test_any_text_and_any_name_survive(source: str, texts: list[str]) -> None:
    import os

    catalog = Catalog(Path(os.environ["HOME"]) / "any.db", read_only=False)
    catalog.replace_document(source, "1", "{}", cut(*texts))
    assert [chunk.text for chunk in catalog.chunks(source)] == texts
    document = catalog.document(source)
    assert document is not None
    assert document.source == source
    assert catalog.remove_document(source)
    catalog.close()


def test_another_catalog_version_is_refused(tmp_path: Path) -> None:
    Catalog(tmp_path / "catalog.db", read_only=False).close()
    connection = sqlite3.connect(tmp_path / "catalog.db")
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    for read_only in (True, False):
        with pytest.raises(IntegrityError, match="catalog version 7"):
            Catalog(tmp_path / "catalog.db", read_only=read_only)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_catalog_of_version_1_is_brought_up(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "catalog.db"
    connection = sqlite3.connect(path)
    for statement in schema._VERSION_1:
        connection.execute(statement)
    connection.execute("PRAGMA user_version = 1")
    connection.execute("INSERT INTO document VALUES ('a.md', 'd', '{}', 1, 3, 5.0, 1)")
    connection.execute("INSERT INTO chunk VALUES ('a.md', 0, 'c', 'text', 3, 0, 4)")
    connection.commit()
    connection.close()
    catalog = Catalog(path, read_only=read_only)
    assert [d.source for d in catalog.documents()] == ["a.md"]
    assert [c.text for c in catalog.chunks("a.md")] == ["text"]
    assert catalog.ask("SELECT pinned, size, mtime_ns FROM document") == [(0, -1, 0)]
    assert catalog.ask("SELECT count(*) FROM counter") == [(0,)]
    catalog.close()


def test_a_pin_outlasts_replacing(catalog: Catalog) -> None:
    catalog.replace_document("a", "1", "{}", cut("one"))
    with catalog.writing() as db:
        db.execute("UPDATE document SET pinned = 1")
    catalog.replace_document("a", "2", "{}", cut("two"))
    assert catalog.ask("SELECT pinned, digest, place FROM document") == [(1, "2", 1)]


def test_altered_text_is_refused(catalog: Catalog) -> None:
    catalog.replace_document("a", "1", "{}", cut("one"))
    catalog._db.execute("UPDATE chunk SET text = CAST(x'ff61' AS TEXT)")
    with pytest.raises(IntegrityError, match="altered"):
        catalog.chunks()


def test_documents_are_in_a_collection_once_and_putting_them_again_writes_nothing(
    catalog: Catalog,
) -> None:
    names = ["a", "\udcff b", "c"]
    for name in names:
        catalog.replace_document(name, "1", "{}", cut(name))
    assert catalog.collect("x", ["a", "a", "\udcff b"]) == 2
    before = catalog.revision
    assert catalog.collect("x", ["\udcff b", "a"]) == 0
    assert catalog.revision == before
    assert catalog.collect("x", names) == 1
    assert [chunk.text for chunk in catalog.chunks(collections=["x"])] == names
    assert catalog.collections_of("\udcff b") == ["x"]
    assert catalog.sources_beginning("\udcff", 9) == ["\udcff b"]
    assert catalog.uncollect("x", ["c", "d"]) == 1
    with pytest.raises(UsageError, match="no name of a collection"):
        catalog.replace_document("a", "2", "{}", cut("new"), collections=["two words"])
    assert catalog.chunks("a")[0].text == "a"  # nothing of it happened
