"""Nothing that is read from a disk may run, and nothing outside a store is read or written."""

import contextlib
import os
import pickle
import re
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.disk import ChunkDisk
from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from tests.cache_store.support import CONTEXT, SPEC, file_of, make_layers, put, read

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(
    r"^\s*(import|from) (c?[pP]ickle|marshal|shelve|dill|joblib|cloudpickle)\b"
    r"|^\s*(import|from) (ruamel\.)?yaml\b|\bUnpickler\b"
    r"|\bpickle\.loads?\(|\btorch\.load\(|\bnumpy\.load\(|\bnp\.load\(|(?<![\w.])(eval|exec)\(",
    re.MULTILINE,
)


@pytest.mark.parametrize("package", ["cache_store", "engine", "cbcli"])
def test_no_code_of_ours_loads_what_could_run(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in files
        for match in FORBIDDEN.finditer(path.read_text("utf-8"))
    ]
    assert found == []


def test_using_a_store_unpickles_nothing(tmp_path: Path) -> None:
    seen: list[str] = []
    watching = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if watching and event in ("pickle.find_class", "marshal.loads") and args[:1] != (b"",):
            seen.append(f"{event} {args}")

    sys.addaudithook(hook)
    try:
        with ChunkStore.open(tmp_path / "store", limit_bytes=2**24) as store:
            key = put(store, (1, 2))
            store.catalog.replace_document("a", "d", "{}", [])
        (tmp_path / "store" / "kv" / "cache.db").write_bytes(b"x" * 9000)
        with ChunkStore.open(tmp_path / "store", on_damage="mend") as store:
            read(store, key)
            assert store.find(SPEC, (1, 2), CONTEXT) is not None
            store.verify(repair=True)
            store.stats()
    finally:
        watching = False
    assert [event for event in seen if event.startswith("pickle")] == []


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_hold_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        root = tmp_path / "store"
        with ChunkStore.open(root, limit_bytes=2**24) as store:
            put(store, (1, 2))
        (root / "kv" / "cache.db").write_bytes(b"x" * 9000)
        with ChunkStore.open(root, on_damage="mend") as store:
            put(store, (3,))
            for path in (root, *root.rglob("*")):
                wanted = 0o700 if path.is_dir() else 0o600
                assert path.stat().st_mode & 0o777 == wanted, path
        (root / "kv").chmod(0o777)
        (root / "kv" / "partial").chmod(0o777)
        with ChunkStore.open(root):
            pass
        assert (root / "kv").stat().st_mode & 0o777 == 0o700
        assert (root / "kv" / "partial").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


class Trap:
    """Once unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


@pytest.mark.usefixtures("no_unpickling")
@pytest.mark.parametrize("mode", range(6))  # none, raw, binary, text, pickle, and one more
@pytest.mark.parametrize("where", ["entry", "group", "key", "tag"])
def test_pickles_in_rows_of_every_kind_never_run(
    store: ChunkStore, tmp_path: Path, mode: int, where: str
) -> None:
    key, mark = put(store, (1, 2)), tmp_path / "mark"
    data = pickle.dumps(Trap(mark))
    update = {
        "entry": "SET mode = :mode, filename = NULL, value = :data WHERE filename NOT NULL",
        "group": "SET mode = :mode, value = :data WHERE filename IS NULL",
        "key": "SET mode = :mode, raw = 0, key = :data WHERE filename NOT NULL",
        "tag": "SET mode = :mode, tag = :data WHERE filename NOT NULL",
    }
    file_of(store, key).write_bytes(data)
    with contextlib.closing(sqlite3.connect(store.path / "kv" / "cache.db")) as connection:
        connection.execute(f"UPDATE Cache {update[where]}", {"mode": mode, "data": data})
        connection.commit()
    for action in (
        lambda: store.find(SPEC, (1, 2), CONTEXT),
        lambda: store.open_entry(key),
        lambda: list(store.entries()),
        lambda: store.stats(),
        lambda: store.verify(),
        lambda: store.set_limit(2**23),
        lambda: store.verify(repair=True),
    ):
        with contextlib.suppress(CacheblendError):
            action()
    assert store.verify().problems == ()
    put(store, (1, 2))
    match = store.find(SPEC, (1, 2), CONTEXT)
    assert match is not None
    assert read(store, match.key)[1] == make_layers(SPEC, 2)
    assert not mark.exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", ["kv", "kv/partial", "kv/leases", "journal"])
def test_folders_that_are_links_lead_nowhere(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    with ChunkStore.open(root, limit_bytes=2**24) as store:
        put(store, (1, 2))
        store.journal.append({"a": 1})
    folder = root / name
    if folder.exists():
        folder.rename(outside)
    else:
        outside.mkdir()
    (outside / "precious").write_text("kept")
    folder.symlink_to(outside)
    before = snapshot(outside)
    with contextlib.suppress(CacheblendError), ChunkStore.open(root) as store:
        for action in (
            lambda: store.protect(put(store, (3, 4))),
            lambda: store.claim("a" * 64),
            lambda: store.journal.append({"b": 2}),
            lambda: store.verify(repair=True),
            lambda: store.set_limit(2**23),
        ):
            with contextlib.suppress(CacheblendError):
                action()
    assert snapshot(outside) == before


@pytest.mark.parametrize("ending", ["0123456789abcdef.claim", "a" * 64 + ".00000000.kv"])
def test_links_among_what_is_being_written_go_and_their_targets_stay(
    store: ChunkStore, tmp_path: Path, ending: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    link = store.path / "kv" / "partial" / ending
    link.symlink_to(precious)
    put(store, (1, 2))
    store.verify(repair=True)
    assert precious.read_text() == "kept"
    assert not link.is_symlink()


def test_a_link_swapped_in_after_the_look_up_is_not_followed(
    store: ChunkStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = put(store, (1, 2)), put(store, (3, 4))
    file, outside = file_of(store, key), tmp_path / "outside.kv"
    real = ChunkDisk.path_of

    def swapped(self: ChunkDisk, name: object) -> Path:
        path = real(self, name)
        if path == file and not path.is_symlink():
            path.rename(outside)
            path.symlink_to(outside)
        return path

    monkeypatch.setattr(ChunkDisk, "path_of", swapped)
    for action in (
        lambda: store.find(SPEC, (1, 2), CONTEXT),
        lambda: store.open_entry(key),
        lambda: store.discard(key),
        lambda: store.verify(repair=True),
    ):
        with contextlib.suppress(CacheblendError):
            assert action() is None or not file.is_symlink()
    assert outside.exists()
    assert read(store, other)[1] == make_layers(SPEC, 2)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o20600, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("nobody but root makes devices")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, device, folder])
def test_what_is_no_file_in_the_place_of_one_is_damage_and_never_waited_for(
    store: ChunkStore, make: Callable[[Path], None]
) -> None:
    key = put(store, (1, 2))
    path = file_of(store, key)
    path.unlink()
    make(path)

    done: list[bool] = []

    def use() -> None:
        assert store.find(SPEC, (1, 2), CONTEXT) is None
        with pytest.raises(CacheblendError):
            store.open_entry(key)
        assert [problem.where for problem in store.verify().problems] == [key]
        done.append(True)

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(20)
    assert done
    put(store, (1, 2))
    assert read(store, key)[1] == make_layers(SPEC, 2)
