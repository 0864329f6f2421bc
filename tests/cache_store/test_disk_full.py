"""The disk full at every single call that may take space, in turn: one line, what was there stays
as it is, and the same works once there is room again."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cache_store.index_database
from cache_store.archive import ArchiveReader
from cache_store.catalog import ChunkText
from cache_store.errors import CacheblendError, NoSpace
from cache_store.exporting import export_file, export_to, plan_export
from cache_store.importing import Import
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, CONTEXT, SPEC, make_layers, put, read

CALLS = ("pwrite", "write", "posix_fallocate", "ftruncate", "fsync", "mkdir", "rename", "replace")
MOST = 60  # calls that an operation makes, at most


class FullDisk:
    """Counts the calls that may take space; the n-th and those after it fail until it is over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = MOST + 1
        self.failed = ""
        for name in CALLS:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(os, "open", self._counted("open", os.open, makes=True))

    def _counted(self, name: str, real: Any, *, makes: bool = False) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if makes and not (len(args) > 1 and args[1] & os.O_CREAT):
                return real(*args, **named)
            if name == "ftruncate" and args[1] < os.fstat(args[0]).st_size:
                return real(*args, **named)  # gives space back
            self.left -= 1
            if self.left <= 0:
                self.failed = self.failed or name
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **named)

        return call

    def fill(self, left: int) -> None:
        self.left, self.failed = left, ""

    def empty(self) -> None:
        self.left = 10**9


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def texts(*names: str) -> list[ChunkText]:
    return [ChunkText(chunk_id(name), name, 0, 1, 1) for name in names]


@pytest.fixture
def store(tmp_path: Path, disk: FullDisk) -> Iterator[ChunkStore]:
    disk.empty()
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**28) as store:
        put(store, (1, 2), chunk_id=chunk_id("a"))
        store.catalog.replace_document("doc", "first", "{}", texts("a", "b"))
        yield store
        disk.empty()


def state(store: ChunkStore) -> object:
    documents = [(d, store.catalog.chunks(d.source)) for d in store.catalog.documents()]
    return documents, {e.key: read(store, e.key)[1] for e in store.entries()}


def each_call(
    store: ChunkStore, disk: FullDisk, operation: Callable[[int], object], *, undone: bool = True
) -> set[str]:
    """Has it fail at every call in turn; the calls that failed."""
    seen: set[str] = set()
    for number in range(1, MOST):
        before, told = state(store), None
        disk.fill(number)
        try:
            operation(number)
            done = True
        except (CacheblendError, OSError) as error:
            done, told = False, error
        failed = disk.failed
        disk.empty()
        if failed:
            seen.add(failed)
        if isinstance(told, CacheblendError):
            assert "no space left" in told.message.lower()
            assert "\n" not in told.message
        elif told is not None:  # commands make that line of it
            assert told.errno == errno.ENOSPC
        if not done and undone:
            assert state(store) == before, failed
        operation(number)  # the same, with room
        found = store.verify()
        assert found.ok == found.checked
        assert found.problems == ()
        if not failed:
            return seen
    raise AssertionError("it never came through")


def test_a_prompt_goes_on_with_what_is_there(
    tmp_path: Path, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **named: Any) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(cache_store.index_database, "new_cache", full)
    with ChunkStore.open(store.path, on_damage="go_on") as other:
        assert [type(fault) for fault in other.faults] == [NoSpace]
        assert other.read_only
        assert other.find(SPEC, (1, 2), CONTEXT)
        assert [info.source for info in other.catalog.documents()] == ["doc"]
    with pytest.raises(NoSpace, match="no space left"):
        ChunkStore.open(store.path)


def test_entries_give_way_without_a_transaction(store: ChunkStore) -> None:
    keys = [put(store, (n, 7), chunk_id=chunk_id("a")) for n in range(3)]
    (first, *_) = store.entries()
    with ChunkStore.open(store.path, read_only=True) as other:
        assert other.give_way(1) == [first.key]
    assert store.find(SPEC, (1, 2), CONTEXT) is None
    assert store.discard(first.key) == first.nbytes
    assert {entry.key for entry in store.entries()} == set(keys)
    assert store.verify().problems == ()


def test_put(store: ChunkStore, disk: FullDisk) -> None:
    def operation(number: int) -> None:
        key = put(store, (number, 7, 7), spec=BIG)
        assert read(store, key)[1] == make_layers(BIG, 3)

    seen = each_call(store, disk, operation)
    assert {"open", "posix_fallocate", "pwrite", "fsync", "rename"} <= seen


def test_replace_document(store: ChunkStore, disk: FullDisk) -> None:
    def operation(number: int) -> None:
        store.catalog.replace_document("doc", f"{number}", "{}", texts("a", f"{number}"))
        assert [c.text for c in store.catalog.chunks("doc")] == ["a", f"{number}"]

    assert each_call(store, disk, operation)


def test_protect_and_claim(store: ChunkStore, disk: FullDisk) -> None:
    """A lease that can't be written costs nobody anything but others' regard for it."""
    (entry,) = store.entries()
    root = store.path

    def operation(number: int) -> None:
        with ChunkStore.open(root) as other:
            other.protect(entry.key)
            other.claim(f"{number:064x}")

    each_call(store, disk, operation)


def test_journal(store: ChunkStore, disk: FullDisk) -> None:
    def operation(number: int) -> None:
        counted = store.journal.next_number()
        store.journal.append({"number": counted, "of": number})

    each_call(store, disk, operation)
    found = store.journal.read()
    assert found.damaged == 0
    assert [record["of"] for record in found.records] == sorted(
        record["of"] for record in found.records
    )


def test_counters(store: ChunkStore, disk: FullDisk) -> None:
    total = 0

    def operation(number: int) -> None:
        nonlocal total
        store.counters.add("hit.exact")
        total += 1
        store.counters.flush()
        assert store.counters.read()["hit.exact"] == total

    each_call(store, disk, operation)


def test_export(store: ChunkStore, disk: FullDisk, tmp_path: Path) -> None:
    path = tmp_path / "out.tar"

    def operation(number: int) -> None:
        export_file(store, plan_export(store, None, None), path, lambda done: None)

    path.write_bytes(b"an earlier one")
    each_call(store, disk, operation)
    sink = io.BytesIO()
    export_to(store, plan_export(store, None, None), sink, lambda done: None)
    assert path.read_bytes() == sink.getvalue()


def test_import(store: ChunkStore, disk: FullDisk, tmp_path: Path) -> None:
    sink = io.BytesIO()
    disk.empty()
    export_to(store, plan_export(store, None, None), sink, lambda done: None)
    wanted = state(store)
    with ChunkStore.open(tmp_path / "other", limit_bytes=2**26) as other:
        kept = put(other, (9,))

        def operation(number: int) -> None:
            for entry in list(other.entries()):
                if entry.key != kept and disk.left > MOST:
                    other.discard(entry.key)
            sink.seek(0)
            Import(other, ArchiveReader(sink)).run()

        each_call(other, disk, operation, undone=False)
        other.discard(kept)
        disk.empty()
        operation(0)
        assert state(other)[1] == wanted[1]  # type: ignore[index]


@pytest.mark.parametrize("database", ["index", "catalog"])
def test_a_database_that_cannot_grow(store: ChunkStore, disk: FullDisk, database: str) -> None:
    """SQLite's own writes: what it says of a full disk is said in one line, too."""
    disk.empty()
    index, catalog = store._index._cache._con, store.catalog._db
    connection: sqlite3.Connection = index if database == "index" else catalog
    before = state(store)
    connection.execute("PRAGMA max_page_count = 1")  # as many as there are

    def write(n: int) -> bool:
        if database == "index":
            put(store, (5, n), (6,) * 40)
        else:
            store.catalog.replace_document(f"{n}", "d", "{}", texts(*map(str, range(40))))
        return False

    with pytest.raises(CacheblendError, match="no space left"):
        any(write(n) for n in range(500))
    connection.execute("PRAGMA max_page_count = 1000000")
    now = state(store)
    assert all(row in now[0] for row in before[0])  # type: ignore[index]
    assert all(now[1][key] == layers for key, layers in before[1].items())  # type: ignore[index]
    assert store.verify().problems == ()
    put(store, (5, 999), (6,) * 40, spec=SPEC)
    store.catalog.replace_document("last", "d", "{}", texts(*map(str, range(40))))
