"""Databases of a store that are damaged, lost or locked: named, gone on without, made anew."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import cache_store.index_database
import cache_store.reading
import cache_store.verify
from cache_store.catalog import ChunkText
from cache_store.errors import CacheblendError, DamagedDatabase, StoreBusy, UsageError
from cache_store.index import Index
from cache_store.keys import chunk_id
from cache_store.locks import folder_lock
from cache_store.rebuild import OnDamage, mend
from cache_store.store import ChunkStore
from tests.cache_store.support import (
    CONTEXT,
    SPEC,
    ended,
    file_of,
    files,
    flip,
    in_child,
    make_layers,
    put,
    read,
    scaled,
)

CHUNKS = [(n, n + 1, n + 2) for n in range(12)]
TEXT = "The tide turns twice a day."
LIMIT = 2**25


@pytest.fixture(autouse=True)
def _nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `verify` needn't wait whether what it sees is only changing."""
    monkeypatch.setattr(cache_store.verify, "_CHANGE_SECONDS", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed store with twelve chunks, one of them behind two contexts, and a document."""
    with ChunkStore.open(tmp_path / "store", limit_bytes=LIMIT) as store:
        for ids in CHUNKS:
            put(store, ids, chunk_id=chunk_id(str(ids)))
        put(store, CHUNKS[0], (7, 8), regime="long")
        texts = [ChunkText(chunk_id(TEXT), TEXT, 0, len(TEXT), 3)]
        store.catalog.replace_document("a.md", "digest", "{}", texts)
    return store.path


def index(root: Path) -> Path:
    return root / "kv" / "cache.db"


def garbage(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


def no_magic(path: Path) -> None:
    flip(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def first_byte_only(path: Path) -> None:
    path.write_bytes(b"S")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def inner_pages(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\x5a" * (len(data) - 4096))


def no_text(path: Path) -> None:
    """A byte that is no UTF-8 among the words that describe the tables."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b"NOT NULL", b"NOT \xffULL"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link(path: Path) -> None:
    outside = path.parent.parent.parent / "outside.db"
    path.rename(outside)
    path.symlink_to(outside)


def a_view(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIEW spy AS SELECT 1")
    connection.commit()
    connection.close()


HARMS: list[Callable[[Path], None]] = [
    garbage, no_magic, cut, first_byte_only, emptied, inner_pages, no_text, a_folder, a_fifo,
    a_link, a_view, Path.unlink,
]  # fmt: skip


def all_found(store: ChunkStore) -> bool:
    """Whether every chunk is a hit that gives the bytes that were put."""
    for ids in CHUNKS:
        match = store.find(SPEC, ids, CONTEXT)
        if match is None or not match.exact or read(store, match.key)[1] != make_layers(SPEC, 3):
            return False
    match = store.find(SPEC, CHUNKS[0], (7, 8), regime="long")
    return match is not None and match.exact


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_damaged_index_is_a_miss_and_made_anew(root: Path, harm: Callable[[Path], None]) -> None:
    names = {path.name for path in (root / "kv").glob("*.kv")}
    harm(index(root))
    before = sorted(path.name for path in (root / "kv").iterdir())
    with ChunkStore.open(root, on_damage="go_on") as store:  # as a prompt does
        if store.faults:
            assert len(store.faults) == 1
            assert "cache.db" in store.faults[0].message
            assert store.faults[0].hint
            assert store.read_only
        assert [store.find(SPEC, ids, CONTEXT) for ids in CHUNKS] == [None] * len(CHUNKS) or (
            harm is cut and not store.faults
        )
        assert store.faults or store.damaged
        assert store.catalog.chunk(chunk_id(TEXT)).text == TEXT
        with pytest.raises(CacheblendError):
            put(store, (1,))
    with ChunkStore.open(root, read_only=True, on_damage="go_on") as store:
        report = store.verify()
        assert [problem.where for problem in report.problems][:1] == ["kv/cache.db"]
        assert report.checked == report.ok == len(CHUNKS) + 1
    assert sorted(path.name for path in (root / "kv").iterdir() if path.suffix == ".kv") == [
        name for name in before if name.endswith(".kv")
    ]
    with ChunkStore.open(root, on_damage="mend") as store:  # as an ingest does
        assert [problem.where for problem in store.mended] == ["kv/cache.db"]
        assert all_found(store)
        assert {entry.key for entry in store.entries()} == {name[:64] for name in names}
        assert store.keys_of_chunk(chunk_id(str(CHUNKS[3])))
        assert store.limit >= LIMIT
        if harm is a_view:
            assert store.limit == LIMIT
        put(store, (99,))
    with ChunkStore.open(root) as store:
        assert store.mended == ()
        assert store.verify().problems == ()
    assert index(root).stat().st_mode & 0o777 == 0o600
    if harm is a_link:
        outside = root.parent / "outside.db"
        assert outside.is_file()
        assert not index(root).is_symlink()


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_damaged_catalog_costs_the_texts_alone(root: Path, harm: Callable[[Path], None]) -> None:
    harm(root / "catalog.db")
    with ChunkStore.open(root, on_damage="go_on") as store:
        assert all_found(store)  # KV needs no catalog
        with pytest.raises(DamagedDatabase, match=r"catalog\.db") as found:
            store.catalog.chunks()
        assert "ingest the documents again" in found.value.hint
    for read_only in (True, False) if harm in (emptied, Path.unlink) else ():
        with pytest.raises(DamagedDatabase, match=r"catalog\.db"):
            ChunkStore.open(root, read_only=read_only)
    with ChunkStore.open(root, read_only=True, on_damage="go_on") as store:
        report = store.verify()
        assert (report.checked, report.ok) == (len(CHUNKS) + 1, len(CHUNKS) + 1)
        assert [problem.where for problem in report.problems] == ["catalog.db"]
    with ChunkStore.open(root, on_damage="mend") as store:
        assert [problem.where for problem in store.mended] == ["catalog.db"]
        assert all_found(store)
        assert store.catalog.documents() == []
        store.catalog.replace_document("b.md", "d", "{}", [])
        assert {problem.where for problem in store.verify().problems} <= {
            "catalog.db",
            "catalog.damaged.db",
        }
    aside = root / "catalog.damaged.db"
    with ChunkStore.open(root) as store:
        assert [problem.where for problem in store.verify().problems] == (
            ["catalog.damaged.db"] if aside.exists() else []
        )
        store.verify(repair=True)
        assert not aside.exists()
        assert store.verify().problems == ()
        assert [document.source for document in store.catalog.documents()] == ["b.md"]


@pytest.mark.parametrize("name", ["kv/cache.db", "catalog.db"])
def test_damage_on_any_page_gives_no_wrong_answer(root: Path, name: str) -> None:
    """Whatever is flipped: a hit gives the bytes put, and the next ingest has everything."""
    path = root / name
    good = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    dice = random.Random(4)
    for _ in range(scaled(25)):
        for kept, data in good.items():
            kept.write_bytes(data)
        for extra in {p for p in root.rglob("*") if p.is_file()} - good.keys():
            extra.unlink()
        data = bytearray(good[path])
        for _ in range(dice.choice((1, 1, 8, 200))):
            begin = dice.randrange(len(data))
            size = dice.choice((1, 4, 100, 4096))
            data[begin : begin + size] = dice.randbytes(min(size, len(data) - begin))
        path.write_bytes(data)
        try:
            with ChunkStore.open(root, on_damage="go_on") as store:
                for ids in CHUNKS:
                    match = store.find(SPEC, ids, CONTEXT)
                    if match is not None:
                        header, layers = read(store, match.key)
                        assert header.token_ids == ids
                        assert layers == make_layers(SPEC, 3)
                        assert match.exact == (header.context == CONTEXT)
            with ChunkStore.open(root, on_damage="mend") as store:
                for ids in CHUNKS:
                    put(store, ids)
                assert all(store.contains(SPEC, ids, CONTEXT) for ids in CHUNKS)
                store.verify(repair=True)
                left = [p for p in store.verify().problems if "text was altered" not in p.what]
                assert left == []
        except CacheblendError as error:
            # A catalog that says it is of a later version is left alone, and nothing but that.
            assert "catalog version" in error.message, error  # noqa: PT017


def test_opening_for_writing_waits_no_longer_than_it_should(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diskcache would wait for a minute, whatever it is told."""

    def asked(*args: object) -> None:
        raise AssertionError("while it is locked")

    monkeypatch.setattr(cache_store.index_database, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(cache_store.index_database, "new_cache", asked)
    writer = sqlite3.connect(index(root), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy):
        Index(index(root).parent, read_only=False, patience=0.05)
    writer.close()


def test_a_locked_index_is_waited_for_shortly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_store.reading, "READ_SECONDS", 0.05)
    holder = sqlite3.connect(index(root), isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with ChunkStore.open(root, on_damage="go_on") as store:
        assert [type(fault) for fault in store.faults] == [StoreBusy]
        assert store.find(SPEC, CHUNKS[0], CONTEXT) is None
        assert store.catalog.chunk(chunk_id(TEXT)).text == TEXT
        with pytest.raises(StoreBusy):
            store.verify()
    holder.close()
    writer = sqlite3.connect(index(root), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # readers needn't care
    with ChunkStore.open(root, on_damage="go_on") as store:
        assert all_found(store)
        assert store.read_only
        assert [type(fault) for fault in store.faults] == [StoreBusy]
    writer.close()
    with ChunkStore.open(root, on_damage="go_on") as store:
        assert store.faults == []
        assert all_found(store)


def test_damage_that_shows_up_while_the_store_is_open(root: Path) -> None:
    with ChunkStore.open(root, on_damage="go_on") as store:
        match = store.find(SPEC, CHUNKS[0], CONTEXT)
        assert match is not None
        for end in ("-wal", "-shm"):
            index(root).with_name("cache.db" + end).unlink(missing_ok=True)
        inner_pages(index(root))
        for ids in CHUNKS:  # SQLite may still know some of it
            found = store.find(SPEC, ids, CONTEXT)
            assert found is None or read(store, found.key)[1] == make_layers(SPEC, 3)
        assert store.damaged
        assert store.discard(match.key) == 0  # nothing can be removed: it is passed over
    with ChunkStore.open(root, on_damage="mend") as store:
        assert all_found(store)


def test_a_process_that_has_the_store_open_goes_over_to_the_new_databases(root: Path) -> None:
    with ChunkStore.open(root) as store:
        put(store, (50,))
        for path in (index(root), root / "catalog.db"):
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink(missing_ok=True)
            garbage(path)
        assert len(mend(root)) == 2
        assert mend(root) == []
        key = put(store, (51,))
        store.catalog.replace_document("c.md", "d", "{}", [])
    with ChunkStore.open(root) as store:
        assert read(store, key)[1] == make_layers(SPEC, 1)
        assert store.contains(SPEC, (50,), CONTEXT)
        assert [document.source for document in store.catalog.documents()] == ["c.md"]
        store.verify(repair=True)
        assert store.verify().problems == ()


def test_several_that_meet_the_damage_do_each_other_no_harm(root: Path) -> None:
    garbage(index(root))

    def ingest(number: int) -> None:
        with ChunkStore.open(root, on_damage="mend") as store:
            for n in range(6):
                put(store, (100 + number, n))

    children = [in_child(lambda n=n: ingest(n)) for n in range(4)]
    assert [ended(child) for child in children] == [0] * 4
    with ChunkStore.open(root) as store:
        assert all_found(store)
        for number in range(4):
            assert all(store.contains(SPEC, (100 + number, n), CONTEXT) for n in range(6))
        assert store.verify().problems == ()


def test_killed_while_it_makes_the_index_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cache_store.rebuild as rebuild

    for name in ("_remove_database", "_sound_files", "new_cache", "_write_rows"):
        garbage(index(root)) if index(root).exists() else None
        real = getattr(rebuild, name)

        def dying(*args: object, real: Callable[..., object] = real) -> None:
            real(*args)
            os._exit(9)

        def mending() -> None:
            monkeypatch.setattr(rebuild, name, dying)  # noqa: B023
            ChunkStore.open(root, on_damage="mend").close()

        assert ended(in_child(mending)) == 9
        with ChunkStore.open(root, on_damage="go_on") as store:
            assert store.faults
        with ChunkStore.open(root, on_damage="mend") as store:
            assert store.mended
            assert all_found(store)
            assert [problem.where for problem in store.verify().problems] == ["kv/cache.db"]
            assert store.verify().problems == ()


def test_damaged_files_are_left_out_of_the_new_index_and_named(root: Path) -> None:
    with ChunkStore.open(root) as store:
        keys = [entry.key for entry in store.entries()]
        bad, double, other = (file_of(store, key) for key in keys[:3])
    flip(bad, 40)
    os.utime(double, (1, 1))
    newer = double.with_name(f"{keys[1]}.00000000.kv")
    newer.write_bytes(double.read_bytes())
    foreign = double.with_name(f"{keys[3]}.11111111.kv")
    foreign.write_bytes(other.read_bytes())  # another entry's file under this name
    link = double.with_name("link.kv")
    link.symlink_to("/etc/hostname")
    index(root).unlink()
    with ChunkStore.open(root, on_damage="mend") as store:
        told = {problem.where for problem in store.mended}
        assert told == {"kv/cache.db", f"kv/{bad.name}", f"kv/{foreign.name}", "kv/link.kv"}
        assert {entry.key for entry in store.entries()} == set(keys) - {keys[0]}
        assert newer in files(store)
        assert double not in files(store)
        assert store.verify().problems[len(told) :] == ()
    assert Path("/etc/hostname").exists()


def test_a_clock_set_back_leaves_the_order_of_use(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with ChunkStore.open(root) as store:
        monkeypatch.setattr(time, "time", lambda: real() - 10 * 86400)
        first = store.find(SPEC, CHUNKS[0], CONTEXT)
        assert first is not None
        read(store, first.key)
        new = put(store, (70,))
        store._index.flush()
        order = [e.key for e in sorted(store.entries(), key=lambda e: e.used_at)]
        assert order[-2:] == [first.key, new]
        half = root / "kv" / "partial" / ("b" * 64 + ".00000000.kv")
        half.write_bytes(b"left by a writer that is gone")
        report = store.verify(repair=True)  # its time is in the future now
        assert [problem.where for problem in report.problems] == [f"kv/partial/{half.name}"]
        assert not half.exists()


def test_a_store_that_cannot_be_written_is_not_mended(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage(index(root))
    monkeypatch.setattr("cache_store.store.is_writable", lambda folder: False)
    with pytest.raises(DamagedDatabase):
        ChunkStore.open(root, on_damage="mend")
    with ChunkStore.open(root, on_damage="go_on") as store:
        assert store.faults
        with pytest.raises(UsageError):
            put(store, (1,))
    assert index(root).read_bytes()[:4] == b"\xa5" * 4


def test_a_prompt_does_not_wait_for_who_mends_the_store(root: Path) -> None:
    with ChunkStore.open(root) as store:
        keys = [entry.key for entry in store.entries()]
        with folder_lock(root, alone=True):
            began = time.monotonic()
            for key in keys:
                store.open_entry(key).close()
            store.note_uses()
            store.counters.add("hit.exact")
            store.counters.flush()
            assert time.monotonic() - began < 10
        store.close()
        with ChunkStore.open(root) as again:
            assert sum(entry.hits for entry in again.entries()) == len(keys)


def test_an_index_lost_beside_a_catalog_of_an_older_version(root: Path) -> None:
    catalog = sqlite3.connect(root / "catalog.db")
    for table in ("counter", "property", "upload", "collection"):
        catalog.execute(f"DROP TABLE {table}")
    for column in ("pinned", "size", "mtime_ns", "kind"):
        catalog.execute(f"ALTER TABLE document DROP COLUMN {column}")
    for column in ("unit", "first", "last", "headings"):
        catalog.execute(f"ALTER TABLE chunk DROP COLUMN {column}")
    catalog.execute("PRAGMA user_version = 1")
    catalog.commit()
    catalog.close()
    index(root).unlink()
    assert [problem.where for problem in mend(root)] == [
        "kv/cache.db"
    ]  # it doesn't lock itself out
    with ChunkStore.open(root) as store:
        assert len(store.catalog.documents()) == 1


_WAYS: tuple[OnDamage, ...] = ("go_on", "mend", "raise")


def test_a_store_that_was_never_finished_gets_a_limit_from_who_opens_it(tmp_path: Path) -> None:
    for number, on_damage in enumerate(_WAYS):
        root = tmp_path / str(number)
        (root / "kv").mkdir(parents=True)
        index(root).touch()  # as a crash leaves it
        with ChunkStore.open(root, limit_bytes=LIMIT, on_damage=on_damage) as store:
            assert store.limit == LIMIT
            put(store, CHUNKS[0])
