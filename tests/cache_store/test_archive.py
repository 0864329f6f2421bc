"""Archives: what goes out comes in, and what was made up or cut short never does harm."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from cache_store import exporting
from cache_store.archive import END, MANIFEST, SEAL, ArchivedDocument, ArchiveReader
from cache_store.archived_document import decode_document
from cache_store.catalog import ChunkText, Place
from cache_store.errors import (
    CacheblendError,
    IntegrityError,
    NotFoundError,
    StoreFullError,
    UsageError,
)
from cache_store.exporting import PART, export_file, export_to, plan_export
from cache_store.importing import Import
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, SPEC, du, files, flip, put, read

STRESS = float(os.environ.get("CACHEBLEND_STRESS", "1"))
OTHER = replace(SPEC, model="other" * 8)
SOURCES = ("/far/plan.md", "/far/\udcffideas.txt")


def nothing(done: int) -> None: ...


def fill(store: ChunkStore) -> list[str]:
    """Two documents of three chunks that share one, for two models, a prefix and an orphan."""
    store.catalog.name_model(SPEC.model, "tiny")
    keys = [put(store, (9, 9), ())]
    for number, source in enumerate(SOURCES):
        texts = [f"{source.encode('utf-8', 'replace')!r} {n}" for n in range(2)] + ["shared"]
        chunks = [ChunkText(chunk_id(t), t, n, n + 1, 3) for n, t in enumerate(texts)]
        store.catalog.replace_document(source, f"digest {number}", '{"cut":9}', chunks)
        for place, text in enumerate(texts):
            ids = (7, 7) if text == "shared" else (number, place, 1)
            for spec in (SPEC, OTHER):
                keys.append(put(store, ids, spec=spec, chunk_id=chunk_id(text), seed=place))
    keys.append(put(store, (5, 5, 5), chunk_id=chunk_id("of no document")))
    return list(dict.fromkeys(keys))


def exported(store: ChunkStore, *sources: str, models: set[str] | None = None) -> bytes:
    sink = io.BytesIO()
    export_to(store, plan_export(store, set(sources) or None, models), sink, nothing)
    return sink.getvalue()


def take_in(store: ChunkStore, data: bytes, **options: Any):
    return Import(store, ArchiveReader(io.BytesIO(data)), **options).run()


def contents(store: ChunkStore) -> Any:
    documents = [
        (d.source, d.digest, d.settings, store.catalog.chunks(d.source))
        for d in store.catalog.documents()
    ]
    return documents, {e.key: read(store, e.key) for e in store.entries()}


@pytest.fixture
def full(store: ChunkStore) -> ChunkStore:
    fill(store)
    return store


@pytest.fixture
def empty(tmp_path: Path):
    with ChunkStore.open(tmp_path / "empty", limit_bytes=2**26) as store:
        yield store


# There and back.


def test_what_goes_out_comes_in_and_nothing_else(full: ChunkStore, empty: ChunkStore) -> None:
    data = exported(full)
    report = take_in(empty, data)
    assert (report.documents, report.entries) == (2, 12)
    assert contents(empty) == contents(full)
    assert empty.verify().problems == ()
    assert empty.catalog.model_name(SPEC.model) == "tiny"
    again = take_in(empty, data)
    assert (again.documents, again.entries) == (0, 0)
    assert (again.kept_documents, again.kept_entries) == (2, 12)
    assert exported(empty) == data  # nothing of time or place is in it


def test_places_headings_kinds_and_collections_travel(store: ChunkStore, empty: ChunkStore) -> None:
    texts, places = ["one", "two"], [Place("page", 3, 4), None]
    chunks = [
        ChunkText(chunk_id(t), t, n, n + 1, 3, place, ("Tides", "Spring \ud83d") if n else ())
        for n, (t, place) in enumerate(zip(texts, places, strict=True))
    ]
    store.catalog.replace_document("a.pdf", "d", "{}", chunks, kind="pdf", collections=["x", "y/z"])
    data = exported(store)
    take_in(empty, data)
    (info,) = empty.catalog.documents()
    assert info.kind == "pdf"
    assert empty.catalog.chunks() == store.catalog.chunks()
    assert empty.catalog.collections() == {"x": ["a.pdf"], "y/z": ["a.pdf"]}
    assert exported(empty) == data
    # What is there already comes into the collections it hasn't got, and stays in its own.
    empty.catalog.uncollect("x")
    empty.catalog.collect("mine", ["a.pdf"])
    assert take_in(empty, data).kept_documents == 1
    assert list(empty.catalog.collections()) == ["mine", "x", "y/z"]


@pytest.mark.parametrize(
    "extra",
    [
        {"places": [["page", 3, 2]]},
        {"places": [["page", 1, 2], None]},
        {"places": [["Page\n", 1, 1]]},
        {"places": [["page", True, 1]]},
        {"places": {"unit": "page"}},
        {"headings": [["a", 1]]},
        {"headings": ["Tides"]},
        {"headings": []},
        {"kind": "../pdf"},
        {"kind": 3},
        {"collections": ["two words"]},
        {"collections": "work"},
        {"collections": None},
    ],
)
def test_what_is_told_of_a_document_is_checked(extra: dict[str, Any]) -> None:
    promised = ArchivedDocument("a", "d", "{}")
    row = {
        "source": "a",
        "digest": "d",
        "settings": "{}",
        "chunks": [[chunk_id("t"), 0, 1, 1, "t"]],
    }
    assert decode_document(json.dumps(row).encode(), promised).chunks[0].place is None  # as of old
    with pytest.raises(IntegrityError, match="can't be understood"):
        decode_document(json.dumps({**row, **extra}).encode(), promised)


def test_an_archive_is_a_tar_file_of_plain_files(full: ChunkStore, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(exported(full))
    listed = subprocess.run(["tar", "tvf", str(path)], capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "")
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert names[:2] == [MANIFEST, SEAL]
    assert sum(name.startswith("chunks/") for name in names) == 12
    assert sum(name.startswith("documents/") for name in names) == 2
    assert all(line.startswith("-rw-------") for line in listed.stdout.splitlines())


def test_documents_and_models_are_chosen(full: ChunkStore, empty: ChunkStore) -> None:
    data = exported(full, SOURCES[0], models={SPEC.model})
    take_in(empty, data)
    documents, entries = contents(empty)
    assert [source for source, *_ in documents] == [SOURCES[0]]
    assert len(entries) == 4  # three chunks and the prefix they are behind; no orphan
    assert {header.spec for header, _ in entries.values()} == {SPEC}
    with pytest.raises(NotFoundError):
        plan_export(full, {"no such"}, None)


def test_a_document_of_the_same_source_is_kept_refused_or_replaced(
    full: ChunkStore, empty: ChunkStore
) -> None:
    data = exported(full)
    other = "another text"
    chunks = [ChunkText(chunk_id(other), other, 0, 1, 3)]
    empty.catalog.replace_document(SOURCES[0], "another digest", "{}", chunks)
    put(empty, (4, 4), chunk_id=chunk_id(other))
    before = contents(empty)
    with pytest.raises(UsageError, match=SOURCES[0]):
        take_in(empty, data)
    assert contents(empty) == before
    report = take_in(empty, data, conflict="keep")
    assert (report.kept_documents, report.documents) == (1, 1)
    assert empty.catalog.document(SOURCES[0]).digest == "another digest"  # type: ignore[union-attr]
    report = take_in(empty, data, conflict="replace")
    assert (report.replaced_documents, report.kept_documents) == (1, 1)
    assert sorted(contents(empty)[1]) == sorted(contents(full)[1])  # the replaced one's KV is gone
    assert [c.text for c in empty.catalog.chunks(SOURCES[0])][-1] == "shared"


def test_what_does_not_fit_is_refused_before_any_work(full: ChunkStore, tmp_path: Path) -> None:
    for number in range(40):
        put(full, (number, 1) * 8, spec=BIG, chunk_id=chunk_id(str(number)))
    data = exported(full)
    with ChunkStore.open(tmp_path / "small", limit_bytes=2**23) as small:
        with pytest.raises(StoreFullError, match="would need a limit"):
            take_in(small, data)
        assert contents(small) == ([], {})


def test_the_limit_holds_while_an_archive_comes_in(full: ChunkStore, tmp_path: Path) -> None:
    for number in range(12):
        put(full, (number, 1) * 8, spec=BIG, chunk_id=chunk_id(str(number)))
    data = exported(full)
    path = tmp_path / "small"
    with ChunkStore.open(path, limit_bytes=2**24) as small:
        for number in range(20):  # what was there goes, in the usual order
            put(small, (number, 2) * 8, spec=BIG)
        most = 0

        def watch(done: int) -> None:
            nonlocal most
            most = max(most, du(path))

        Import(small, ArchiveReader(io.BytesIO(data), watch)).run()
        assert 0 < most <= 2**24
        assert small.verify().problems == ()


# Damaged and made up.


def test_an_archive_cut_short_anywhere_names_the_member_and_keeps_what_came_before(
    full: ChunkStore, tmp_path: Path
) -> None:
    data = exported(full)
    source = random.Random(3)
    names = [*(m.name for m in ArchiveReader(io.BytesIO(data)).manifest.members), "its end"]
    for number in range(int(12 * STRESS)):
        cut = source.randrange(512, len(data))  # else it is no archive at all
        with ChunkStore.open(tmp_path / f"s{number}", limit_bytes=2**26) as store:
            with pytest.raises(IntegrityError, match="the archive is damaged at") as raised:
                take_in(store, data[:cut])
            said = raised.value.message.split(" at ")[1].split(":")[0]
            assert said in (MANIFEST, SEAL, *names)
            assert store.verify().problems == ()
            there = {e.key for e in store.entries()}
            assert there == {n[7:71] for n in names[: _place(names, said)] if n[:6] == "chunks"}
            take_in(store, data)
            assert contents(store) == contents(full)


def _place(names: list[str], said: str) -> int:
    return names.index(said) if said in names else 0


def test_a_bit_flipped_anywhere_is_found_or_changes_nothing(
    full: ChunkStore, tmp_path: Path
) -> None:
    data, wanted = exported(full), contents(full)
    source = random.Random(4)
    path = tmp_path / "a.tar"
    for number in range(int(25 * STRESS)):
        path.write_bytes(data)
        flip(path, source.randrange(len(data)))
        with ChunkStore.open(tmp_path / f"s{number}", limit_bytes=2**26) as store:
            try:
                take_in(store, path.read_bytes())
            except IntegrityError as error:
                said = error.message
            else:  # a field of a tar header that says nothing to us, as an owner
                said = ""
                assert contents(store) == wanted
            assert not said or "damaged at" in said
            assert store.verify().problems == ()
            for key, entry in contents(store)[1].items():
                assert entry == wanted[1][key]


class Forged:
    """An archive's members, to be changed; `data` seals the manifest and writes the file."""

    def __init__(self, data: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            self.members = [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
        self.manifest = json.loads(self.members[0][1])

    def data(self, *, sealed: bool = True) -> bytes:
        if sealed:
            body = json.dumps(self.manifest).encode()
            self.members[0] = (self.members[0][0], body)
            self.members[1] = (self.members[1][0], blake3(body).hexdigest().encode())
        sink = io.BytesIO()
        for info, content in self.members:
            if info.isreg():
                info.size = len(content)
            sink.write(info.tobuf(tarfile.GNU_FORMAT) + content)
            sink.write(bytes(-len(content) % 512))
        return sink.getvalue() + END

    def rename(self, place: int, name: str) -> None:
        """A member's name, in the manifest and in the file."""
        self.members[place][0].name = self.manifest["members"][place - 2][0] = name


def _rename(name: str) -> Callable[[Forged], None]:
    return lambda forged: forged.rename(2, name)


def _type(kind: bytes) -> Callable[[Forged], None]:
    def change(forged: Forged) -> None:
        info = forged.members[2][0]
        info.type, info.linkname, info.size = kind, "/etc/passwd", 0
        forged.members[2] = (info, b"")

    return change


def _twice(forged: Forged) -> None:
    forged.members.insert(3, forged.members[2])
    forged.manifest["members"].insert(1, forged.manifest["members"][0])


def _more_than_said(forged: Forged) -> None:
    forged.members.append(forged.members[2])


def _sized(size: object) -> Callable[[Forged], None]:
    def change(forged: Forged) -> None:
        forged.manifest["members"][0][1] = size

    return change


def _set(name: str, value: object) -> Callable[[Forged], None]:
    return lambda forged: forged.manifest.__setitem__(name, value)


def _swapped(forged: Forged) -> None:
    """One entry's bytes under another's name, the checksum put right."""
    chunks = [n for n, (info, _) in enumerate(forged.members) if info.name.startswith("chunks/")]
    first, second = chunks[1], chunks[2]
    forged.members[first] = (forged.members[first][0], forged.members[second][1])
    members = forged.manifest["members"]
    members[first - 2][1:] = members[second - 2][1:]


def _another_text(forged: Forged) -> None:
    place = next(n for n, (i, _) in enumerate(forged.members) if i.name.startswith("documents/"))
    info, body = forged.members[place]
    row = json.loads(body)
    row["chunks"][0][4] = "Wire the money at once."
    body = json.dumps(row).encode()
    forged.members[place] = (info, body)
    forged.manifest["members"][place - 2][1:] = [len(body), blake3(body).hexdigest()]


def _another_source(forged: Forged) -> None:
    forged.manifest["documents"][0][0] = "/etc/hosts"


def _header_of(forged: Forged, change: Callable[[bytearray], None]) -> None:
    """A chunk file's bytes changed, and the checksum in the manifest made to fit its header."""
    info, content = forged.members[2]
    data = bytearray(content)
    change(data)
    forged.members[2] = (info, bytes(data))
    forged.manifest["members"][0][1:] = [len(data), bytes(data[16:32]).hex()]


def _cut_chunk(forged: Forged) -> None:
    _header_of(forged, lambda data: data.__delitem__(slice(-10, None)))


def _foreign_chunk(forged: Forged) -> None:
    _header_of(forged, lambda data: data.__setitem__(slice(0, 8), b"PK\3\4oops"))


HOSTILE: dict[str, Callable[[Forged], None]] = {
    "absolute": _rename("/tmp/chunks/" + "a" * 64 + ".kv"),
    "upwards": _rename("chunks/../../" + "a" * 64 + ".kv"),
    "foreign name": _rename("chunks/run-me.py"),
    "upper case": _rename("chunks/" + "A" * 64 + ".kv"),
    "newline in a name": _rename("chunks/" + "a" * 64 + ".kv\n"),
    "symbolic link": _type(tarfile.SYMTYPE),
    "hard link": _type(tarfile.LNKTYPE),
    "character device": _type(tarfile.CHRTYPE),
    "block device": _type(tarfile.BLKTYPE),
    "pipe": _type(tarfile.FIFOTYPE),
    "folder": _type(tarfile.DIRTYPE),
    "sparse": _type(tarfile.GNUTYPE_SPARSE),
    "extended header": _type(tarfile.XHDTYPE),
    "twice": _twice,
    "more than said": _more_than_said,
    "negative size": _sized(-1),
    "size that is text": _sized("4096"),
    "size that is a float": _sized(1e12),
    "huge size": _sized(2**60),
    "another version": _set("version", 0),
    "another format": _set("format", "zip"),
    "no members": _set("members", None),
    "members that are no list": _set("members", 7),
    "models that are no table": _set("models", [1]),
    "swapped": _swapped,
    "another text": _another_text,
    "another source": _another_source,
    "no documents": _set("documents", []),
    "cut chunk": _cut_chunk,
    "foreign chunk": _foreign_chunk,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing_outside(
    full: ChunkStore, empty: ChunkStore, tmp_path: Path, kind: str
) -> None:
    forged = Forged(exported(full))
    HOSTILE[kind](forged)
    before = sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts)
    with pytest.raises(IntegrityError, match="the archive is damaged at"):
        take_in(empty, forged.data())
    assert sorted(p for p in tmp_path.rglob("*") if "empty" not in p.parts) == before
    assert empty.verify().problems == ()
    wanted = contents(full)[1]
    assert all(wanted[key] == entry for key, entry in contents(empty)[1].items())


def test_a_claim_of_much_is_refused_before_a_byte_is_read(
    full: ChunkStore, empty: ChunkStore
) -> None:
    forged = Forged(exported(full))
    forged.manifest["members"][0][1] = 2**41
    stream = io.BytesIO(forged.data())
    reader = ArchiveReader(stream)
    place = stream.tell()
    with pytest.raises(StoreFullError):
        Import(empty, reader)
    assert stream.tell() == place
    assert files(empty) == []


def test_a_manifest_that_was_altered_is_not_believed(full: ChunkStore) -> None:
    forged = Forged(exported(full))
    info, body = forged.members[0]
    forged.members[0] = (info, body.replace(b"far", b"fat"))
    with pytest.raises(IntegrityError, match="not what was written"):
        ArchiveReader(io.BytesIO(forged.data(sealed=False)))


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\3\4" * 200, bytes(2048), os.urandom(4096), b"[" * 100_000, b"\x1f\x8b" * 600],
    ids=["empty", "zip", "zeros", "noise", "brackets", "gzip"],
)
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="no archive of cacheblend"):
        ArchiveReader(io.BytesIO(data))


def test_an_archive_of_a_later_version_asks_for_a_newer_program(full: ChunkStore) -> None:
    forged = Forged(exported(full))
    _set("version", 10**400)(forged)
    with pytest.raises(IntegrityError, match="later version") as caught:
        ArchiveReader(io.BytesIO(forged.data()))
    assert caught.value.hint == "use a newer cacheblend"


def test_a_number_too_long_to_read_is_told_in_our_words(full: ChunkStore) -> None:
    forged = Forged(exported(full))
    body = forged.members[0][1].replace(b'"version":1', b'"version":' + b"9" * 6000)
    forged.members[0] = (forged.members[0][0], body)
    forged.members[1] = (forged.members[1][0], blake3(body).hexdigest().encode())
    with pytest.raises(IntegrityError, match="it can't be understood"):
        ArchiveReader(io.BytesIO(forged.data(sealed=False)))


def test_deep_json_is_no_crash(full: ChunkStore) -> None:
    forged = Forged(exported(full))
    body = b"[" * 200_000
    forged.members[0] = (forged.members[0][0], body)
    forged.members[1] = (forged.members[1][0], blake3(body).hexdigest().encode())
    with pytest.raises(IntegrityError, match=r"can't be understood|Expecting"):
        ArchiveReader(io.BytesIO(forged.data(sealed=False)))


def test_a_damaged_entry_is_not_exported_as_sound(full: ChunkStore, tmp_path: Path) -> None:
    plan = plan_export(full, None, None)
    victim = files(full)[0]
    flip(victim, victim.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="damaged in layer"):
        export_to(full, plan, io.BytesIO(), nothing)
    flip(files(full)[1], 40)
    again = plan_export(full, None, None)
    assert len(again.damaged) == 2
    assert again.entries == plan.entries - 2
    sink = io.BytesIO()
    export_to(full, again, sink, nothing)
    assert len(ArchiveReader(io.BytesIO(sink.getvalue())).manifest.members) == len(
        again.manifest.members
    )


# Stopped on the way.


class Stop(Exception):
    pass


def test_an_export_goes_on_where_it_was_stopped(full: ChunkStore, tmp_path: Path) -> None:
    path, plan = tmp_path / "a.tar", plan_export(full, None, None)
    data = exported(full)
    part = path.with_name(path.name + PART)

    def stop(done: int) -> None:
        if done > len(data) // 2:
            raise Stop

    with pytest.raises(Stop):
        export_file(full, plan, path, stop)
    assert not path.exists()
    half = part.stat().st_size
    assert len(data) // 2 < half < len(data)
    done = export_file(full, plan, path, nothing)
    assert done.kept >= half - 2**20
    assert path.read_bytes() == data
    assert not part.exists()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["bit", "tail", "other store"])
def test_a_half_that_is_not_ours_is_written_anew(
    full: ChunkStore, tmp_path: Path, how: str
) -> None:
    path, data = tmp_path / "a.tar", exported(full)
    part = path.with_name(path.name + PART)
    part.write_bytes(data[: len(data) // 2] if how != "tail" else data + b"more")
    if how == "bit":
        flip(part, 5000)
    if how == "other store":
        put(full, (3, 3, 3, 3), chunk_id=chunk_id("new"))
    done = export_file(full, plan_export(full, None, None), path, nothing)
    assert path.read_bytes() == exported(full)
    assert done.kept < len(data) // 2 or how == "tail"


def test_a_file_that_may_not_be_read_is_left_out_and_named(
    full: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, opened = files(full)[0], os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path) == str(hidden):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *rest, **named)

    before = plan_export(full, None, None)
    monkeypatch.setattr("cache_store.entry.os.open", refuse)
    plan = plan_export(full, None, None)
    assert plan.entries == before.entries - 1
    assert [hidden.name in line for line in plan.damaged] == [True]


def test_what_only_a_prompt_saved_is_not_exported(full: ChunkStore) -> None:
    before = exported(full)
    put(full, (8, 8, 8), chunk_id=chunk_id("asked once"), saved=True)
    assert exported(full) == before


def test_a_full_disk_names_the_file_that_did_not_fit(
    full: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "a.tar", plan_export(full, None, None)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(exporting.os, "fsync", fail)
        with pytest.raises(CacheblendError, match=r"a\.tar\.part: No space left") as caught:
            export_file(full, plan, path, nothing)
    assert "the same command" in caught.value.hint
    assert export_file(full, plan, path, nothing).kept


def test_two_exports_do_not_write_one_file(full: ChunkStore, tmp_path: Path) -> None:
    path, plan = tmp_path / "a.tar", plan_export(full, None, None)

    def meanwhile(done: int) -> None:
        with pytest.raises(UsageError, match="another process writes"):
            export_file(full, plan, path, nothing)
        raise Stop

    with pytest.raises(Stop):
        export_file(full, plan, path, meanwhile)


def test_a_part_that_another_export_has_just_finished_is_left_alone(
    full: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = tmp_path / "a.tar", plan_export(full, None, None)
    part = path.with_name(path.name + PART)
    lock = exporting.fcntl.flock

    def late(file: Any, kind: int) -> None:
        if not isinstance(file, int):  # else a store's
            os.pwrite(file.fileno(), b"whole", 0)
            part.replace(path)  # the other had it open, too, and is through now
        lock(file, kind)

    monkeypatch.setattr(exporting.fcntl, "flock", late)
    with pytest.raises(UsageError, match="another process has just written"):
        export_file(full, plan, path, nothing)
    assert path.read_bytes() == b"whole"


def test_an_export_while_another_process_writes_and_evicts(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ChunkStore.open(path, limit_bytes=2**24) as store:
        keys = [put(store, (n, 1) * 8, spec=BIG, chunk_id=chunk_id(str(n))) for n in range(12)]
        program = (
            "import sys; from pathlib import Path; from cache_store.store import ChunkStore\n"
            "from tests.cache_store.support import BIG, put\n"
            "store = ChunkStore.open(Path(sys.argv[1]))\n"
            "print('on', flush=True)\n"
            "n = 0\n"
            "while True:\n"
            "    put(store, (n, 2) * 8, spec=BIG); n += 1\n"
        )
        plan = plan_export(store, None, None)
        writer = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "on\n"
            while sum(1 for e in store.entries() if e.key not in keys) < 12:
                time.sleep(0.01)
            sink = io.BytesIO()
            export_to(store, plan, sink, nothing)
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()  # type: ignore[union-attr]
        assert {m.key for m in plan.manifest.members} == set(keys)
    with ChunkStore.open(tmp_path / "other", limit_bytes=2**26) as other:
        take_in(other, sink.getvalue())
        assert {e.key for e in other.entries()} == set(keys)


def test_an_import_killed_at_any_moment_is_gone_on_with(full: ChunkStore, tmp_path: Path) -> None:
    for number in range(30):
        put(full, (number, 1) * 8, spec=BIG, chunk_id=chunk_id(str(number)))
    archive, path = tmp_path / "a.tar", tmp_path / "killed"
    archive.write_bytes(exported(full))
    program = (
        "import sys; from pathlib import Path; from cache_store.store import ChunkStore\n"
        "from cache_store.archive import ArchiveReader; from cache_store.importing import Import\n"
        "store = ChunkStore.open(Path(sys.argv[1]), limit_bytes=2**26)\n"
        "print('on', flush=True)\n"
        "Import(store, ArchiveReader(open(sys.argv[2], 'rb'))).run()\n"
    )
    source, before = random.Random(5), set[str]()
    for _ in range(int(5 * STRESS)):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(archive)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "on\n"
        time.sleep(source.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with ChunkStore.open(path) as store:
            there = {e.key for e in store.entries()}
            assert before <= there  # nothing that was in is lost
            before = there
            # A file that was being written or put in place stays behind; no entry is damaged.
            problems = store.verify().problems
            assert all("half-written" in p.what or "belongs to no" in p.what for p in problems)
    with ChunkStore.open(path) as store:
        report = take_in(store, archive.read_bytes())
        assert report.kept_entries == len(before)
        assert contents(store) == contents(full)
        store.verify(repair=True)
        assert store.verify().problems == ()
