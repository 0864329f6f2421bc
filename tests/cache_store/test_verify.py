import errno
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store import verify
from cache_store.disk import StagedFile
from cache_store.store import ChunkStore
from tests.cache_store.support import CONTEXT, SPEC, change, file_of, files, flip, put, read

IDS = (1, 2, 3)
OTHER = (4, 5)


def sql(store: ChunkStore, statement: str, *values: object) -> None:
    connection = sqlite3.connect(store.path / "kv" / "cache.db")
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def age(path: Path, hours: float = 2) -> Path:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def test_a_sound_store_has_no_problems(store: ChunkStore) -> None:
    assert store.verify() == store.verify(repair=True)
    for n in range(4):
        put(store, IDS, (n,))
    report = store.verify()
    assert (report.checked, report.ok, report.problems, report.repaired) == (4, 4, (), 0)


def test_a_file_that_may_not_be_read_is_a_miss_named_and_kept(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = put(store, IDS), put(store, OTHER)
    path, real = file_of(store, bad), os.open

    def refuse(name: object, *args: Any, **named: Any) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *args, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for repair in (False, True):
            report = store.verify(repair)
            assert (report.checked, report.ok, report.repaired) == (2, 1, 0)
            assert [problem.where for problem in report.problems] == [bad]
            assert "Permission denied" in report.problems[0].what
        assert store.find(SPEC, IDS, CONTEXT) is None
        assert "Permission denied" in store.damaged[0]
        assert store.find(SPEC, OTHER, CONTEXT)
        assert path.exists()
    assert store.verify().problems == ()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        put(store, IDS)  # as an ingest does: stored anew, under another name
        assert store.find(SPEC, IDS, CONTEXT)
    assert {bad, good} == {entry.key for entry in store.entries()}
    assert store.verify().problems == ()


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "cannot be opened"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-5]), "bytes instead of"),
    "header": (lambda path: flip(path, 90), "damaged header"),
    "first layer": (lambda path: flip(path, -200), "damaged in layer"),
    "last byte": (lambda path: flip(path, -1), "damaged in layer 2"),
    "foreign": (lambda path: path.write_bytes(b"x" * 1000), "not a chunk file"),
    "version": (lambda path: change(path, lambda d: d.__setitem__(8, 3)), "format version 3"),
    "link": (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "cannot be opened"),
}


@pytest.mark.parametrize("name", HARMS)
def test_damaged_entries_are_named_and_removed(store: ChunkStore, name: str) -> None:
    harm, what = HARMS[name]
    bad, good = put(store, IDS), put(store, IDS, (8,))
    other = put(store, OTHER)
    harm(file_of(store, bad))
    for _ in range(2):  # looking repairs nothing
        report = store.verify()
        assert (report.checked, report.ok, report.repaired) == (3, 2, 0)
        assert [problem.where for problem in report.problems] == [bad]
        assert what in report.problems[0].what
    report = store.verify(repair=True)
    assert report.repaired == len(report.problems) == 1
    assert store.verify().problems == ()
    assert {entry.key for entry in store.entries()} == {good, other}
    match = store.find(SPEC, IDS, CONTEXT)
    assert match is not None
    assert match.key == good
    assert len(files(store)) == 2


def test_files_of_no_entry(store: ChunkStore) -> None:
    kv = store.path / "kv"
    key = put(store, IDS)
    orphan = kv / ("a" * 64 + ".00000000.kv")
    orphan.write_bytes(file_of(store, key).read_bytes())
    half = kv / "partial" / ("b" * 64 + ".00000000.kv")
    half.write_bytes(b"half")
    foreign, link = kv / "readme.txt", kv / "link.kv"
    foreign.write_text("?")
    link.symlink_to(store.path.parent)
    strangers = [orphan, half, foreign, link]
    # A chunk file is named in the index at once; the others may be somebody's work in progress.
    found = {problem.where for problem in store.verify().problems}
    assert found == {f"kv/{orphan.name}", "kv/link.kv"}
    for path in strangers:
        age(path)
    report = store.verify()
    assert {problem.where for problem in report.problems} == {
        str(path.relative_to(store.path)) for path in strangers
    }
    assert (report.checked, report.ok) == (1, 1)
    report = store.verify(repair=True)
    assert (len(report.problems), report.repaired) == (4, 4)
    assert not any(path.exists() or path.is_symlink() for path in strangers)
    assert store.path.parent.exists()
    assert store.verify().problems == ()


def test_what_is_being_written_is_left_alone(store: ChunkStore) -> None:
    staged = StagedFile(store.path / "kv", store._index.disk.new_name("c" * 64), 5000)
    (path,) = (store.path / "kv" / "partial").iterdir()
    age(path)  # however long it takes
    assert store.verify().problems == ()
    assert store.verify(repair=True).problems == ()
    assert path.exists()
    staged.close()


def test_files_outside_the_stores_own_folder_are_reported_and_kept(store: ChunkStore) -> None:
    notes = store.path / "notes.txt"
    notes.write_text("mine")
    age(notes)
    report = store.verify(repair=True)
    assert [problem.where for problem in report.problems] == ["notes.txt"]
    assert report.repaired == 0
    assert notes.read_text() == "mine"


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DELETE FROM Cache WHERE filename IS NULL AND raw = 1", "in no list"),
        ("UPDATE Cache SET value = x'00' WHERE filename IS NULL", "damaged"),
        ("UPDATE Cache SET value = replace(value, '\"entries\":[[', '\"entries\":[],\"x\":[[')"
         " WHERE filename IS NULL", "never writes"),
        ("UPDATE Cache SET value = CAST(replace(CAST(value AS TEXT), '[1,2,3]', '[1,2,4]')"
         " AS BLOB) WHERE filename IS NULL", "disagrees"),
        ("UPDATE Cache SET value = CAST(replace(CAST(value AS TEXT), '\"tokens\":3',"
         " '\"tokens\":4') AS BLOB) WHERE filename IS NULL", "disagrees"),
    ],
)  # fmt: skip
def test_lists_of_entries_are_put_right(store: ChunkStore, statement: str, what: str) -> None:
    keys = {put(store, IDS, (1, 2, 3)), put(store, IDS, (7,))}
    before = list(store.entries())
    sql(store, statement)
    report = store.verify()
    assert [what in problem.what for problem in report.problems] == [True]
    assert store.verify(repair=True).repaired == 1
    assert store.verify().problems == ()
    assert list(store.entries()) == before
    for context in ((1, 2, 3), (7,)):
        match = store.find(SPEC, IDS, context)
        assert match is not None
        assert match.exact
        assert match.key in keys


def test_a_list_that_names_a_missing_entry_is_put_right(store: ChunkStore) -> None:
    key, other = put(store, IDS), put(store, IDS, (7,))
    sql(store, "DELETE FROM Cache WHERE key = ?", key)
    age(file_of(store, key))
    match = store.find(SPEC, IDS, CONTEXT)
    assert match is not None
    assert match.key == other
    assert len(store.verify().problems) == 2  # the list and the file
    assert store.verify(repair=True).repaired == 2
    assert store.verify().problems == ()
    sql(store, "DELETE FROM Cache WHERE key = ?", other)
    store.verify(repair=True)
    assert list(store.entries()) == []
    assert list(store._index.groups()) == []


def test_a_damaged_index_and_catalog_are_reported(tmp_path: Path) -> None:
    for name in ("kv/cache.db", "catalog.db"):
        with ChunkStore.open(tmp_path / name.replace("/", "-"), limit_bytes=2**24) as store:
            for n in range(30):
                put(store, (n,))
                store.catalog.replace_document(f"{n}" * 50, "d", "{}", [])
        path = store.path / name
        pages = path.stat().st_size // 4096
        change(path, lambda d, p=pages: d.__setitem__(slice(4096 * (p - 1), None), b"\x07" * 4096))
        with ChunkStore.open(store.path, read_only=True) as store:
            report = store.verify()
            assert [problem.where for problem in report.problems] == [name]


def test_verify_reads_everything_and_disturbs_nothing(store: ChunkStore) -> None:
    keys = [put(store, (n,)) for n in range(5)]
    before = [(entry.key, entry.used_at, entry.hits) for entry in store.entries()]
    store.verify()
    store.verify(repair=True)
    assert [(entry.key, entry.used_at, entry.hits) for entry in store.entries()] == before
    assert [read(store, key)[0].key for key in keys] == keys


def test_damage_is_found_in_an_entry_that_is_used_meanwhile(store: ChunkStore) -> None:
    put(store, OTHER)
    key = put(store, IDS)
    flip(file_of(store, key), -1)

    def use(done: int) -> None:
        store._index.touch(key)
        store._index.flush()

    assert [problem.where for problem in store.verify(on_bytes=use).problems] == [key]


def test_an_entry_that_was_stored_anew_meanwhile_is_not_removed(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = put(store, IDS)
    flip(file_of(store, key), 40)
    told = verify._Findings.add

    def store_anew(findings: verify._Findings, where: str, what: str) -> None:
        told(findings, where, what)
        if where == key:
            put(store, IDS)

    monkeypatch.setattr(verify._Findings, "add", store_anew)
    assert [problem.where for problem in store.verify(repair=True).problems] == [key]
    assert read(store, key)[0].key == key
