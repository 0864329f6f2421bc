"""The index is data from the disk: nothing in it may run, lead elsewhere or be believed blindly."""

import io
import os
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from diskcache import Cache

from cache_store.disk import ChunkDisk, StagedFile, is_abandoned
from cache_store.errors import CacheblendError, DamagedEntry, IntegrityError
from cache_store.store import ChunkStore
from tests.cache_store.support import CONTEXT, SPEC, files, put, read

KEY = "0" * 64
IDS = (4, 5, 6)


class Trap:
    """Leaves a mark in the file system when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def sql(store: ChunkStore, statement: str, *values: object) -> None:
    connection = sqlite3.connect(store.path / "kv" / "cache.db")
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def make_pickle_inline(store: ChunkStore, key: str, mark: Path) -> None:
    sql(
        store,
        "UPDATE Cache SET mode = 4, filename = NULL, value = ? WHERE key = ?",
        pickle.dumps(Trap(mark)),
        key,
    )


def make_pickle_file(store: ChunkStore, key: str, mark: Path) -> None:
    files(store)[0].write_bytes(pickle.dumps(Trap(mark)))
    sql(store, "UPDATE Cache SET mode = 4 WHERE key = ?", key)


@pytest.mark.parametrize("plant", [make_pickle_inline, make_pickle_file])
def test_a_planted_pickle_is_refused_and_never_runs(
    store: ChunkStore, tmp_path: Path, plant: Callable[[ChunkStore, str, Path], None]
) -> None:
    key, mark = put(store, IDS), tmp_path / "mark"
    plant(store, key, mark)
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert "never writes (mode 4)" in store.damaged[0]
    with pytest.raises(DamagedEntry, match="mode 4"):
        store.open_entry(key)
    cache = Cache(str(store.path / "kv"), disk=ChunkDisk)
    with pytest.raises(IntegrityError, match="mode 4"):
        cache.get(key)
    with pytest.raises(IntegrityError, match="mode 4"):
        cache.pop(key)
    cache.close()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))  # noqa: S301 (the trap does work)
    assert mark.exists()


def test_a_planted_pickle_in_a_groups_row_never_runs(store: ChunkStore, tmp_path: Path) -> None:
    put(store, IDS)
    mark = tmp_path / "mark"
    sql(
        store,
        "UPDATE Cache SET mode = 4, value = ? WHERE filename IS NULL",
        pickle.dumps(Trap(mark)),
    )
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert list(store.entries()) == []
    assert len(store.verify().problems) == 2
    assert store.verify(repair=True).repaired == 2
    assert store.find(SPEC, IDS, CONTEXT) is not None
    assert store.verify().problems == ()
    assert not mark.exists()


def test_a_planted_key_is_never_unpickled(store: ChunkStore, tmp_path: Path) -> None:
    put(store, IDS)
    mark = tmp_path / "mark"
    sql(
        store,
        "INSERT INTO Cache (key, raw, mode, value) VALUES (?, 0, 1, x'00')",
        pickle.dumps(Trap(mark)),
    )
    cache = Cache(str(store.path / "kv"), disk=ChunkDisk)
    with pytest.raises(IntegrityError, match="a key that is not one of its own"):
        list(cache)
    cache.close()
    assert len(list(store.entries())) == 1
    report = store.verify(repair=True)
    assert [problem.where for problem in report.problems] == ["index"]
    assert report.repaired == 1
    assert store.verify().problems == ()
    assert not mark.exists()


@pytest.mark.parametrize(
    ("mode", "value"), [(1, "text"), (1, 7), (1, None), (3, None), (9, b""), (None, b"")]
)
def test_other_kinds_of_row_are_refused(store: ChunkStore, mode: int | None, value: object) -> None:
    disk = ChunkDisk(str(store.path / "kv"))
    with pytest.raises(IntegrityError, match=r"was not loaded|cannot be one of its own"):
        disk.fetch(mode, None, value, False)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../secret",
        f"../{KEY}.00000000.kv",
        f"a/{KEY}.00000000.kv",
        f"{KEY}.00000000.kv\n",
        "cache.db",
        "partial",
        "",
        7,
        None,
    ],
)
def test_file_names_never_lead_out_of_the_store(
    store: ChunkStore, tmp_path: Path, name: object
) -> None:
    (tmp_path / "store" / "secret").write_text("secret")
    key = put(store, IDS)
    sql(store, "UPDATE Cache SET filename = ? WHERE key = ?", name, key)
    with pytest.raises(IntegrityError, match=r"cannot be one of its own|never writes"):
        ChunkDisk(str(store.path / "kv")).fetch(2, name, None, True)
    assert store.find(SPEC, IDS, CONTEXT) is None
    with pytest.raises(DamagedEntry):
        store.open_entry(key)
    store.discard(key)
    ChunkDisk(str(store.path / "kv")).remove(name)
    assert (store.path / "secret").exists()
    assert (store.path / "kv" / "cache.db").exists()


def test_a_link_in_the_place_of_a_file_is_not_followed(store: ChunkStore, tmp_path: Path) -> None:
    key = put(store, IDS)
    (file,) = files(store)
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    assert store.find(SPEC, IDS, CONTEXT) is None
    with pytest.raises(DamagedEntry):
        store.open_entry(key)
    with pytest.raises(OSError, match="symbolic"):
        ChunkDisk(str(store.path / "kv")).fetch(2, file.name, None, True)
    store.discard(key)
    assert outside.exists()
    assert not file.is_symlink()


def test_odd_settings_are_refused_before_diskcache_obeys_them(tmp_path: Path) -> None:
    for key, value in (
        ("disk_fetch", "x"),
        ("_disk", "x"),
        ("disk_pickle_protocol", "5"),
        ("sqlite_temp_store_directory", "'/tmp'"),
        ("eviction_policy", 5),
        ("size_limit", "1; DROP TABLE Cache"),
    ):
        store = ChunkStore.open(tmp_path / "store", limit_bytes=2**24)
        put(store, IDS)
        store.close()
        sql(store, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
        for read_only in (False, True):
            with pytest.raises(IntegrityError, match=key):
                ChunkStore.open(tmp_path / "store", read_only=read_only)
        sql(store, "DELETE FROM Settings WHERE key = ?", key)


def test_settings_of_a_plain_cache_change_nothing(tmp_path: Path) -> None:
    """A table that asks for pickles, files by size and another eviction: all valid, all undone."""
    ChunkStore.open(tmp_path / "store", limit_bytes=2**24).close()
    Cache(
        str(tmp_path / "store" / "kv"),
        cull_limit=10,
        statistics=1,
        disk_pickle_protocol=5,
        disk_min_file_size=1,
        sqlite_mmap_size=2**26,
        eviction_policy="none",
    ).close()
    with ChunkStore.open(tmp_path / "store") as store:
        put(store, IDS)
        cache = store._index._cache
        assert (cache.cull_limit, cache.eviction_policy) == (0, "least-recently-used")
        with pytest.raises(TypeError, match="bytes and files"):
            cache.set(KEY, {"not": "bytes"})
        with pytest.raises(ValueError, match="64 hex digits"):
            cache.set(("not", "a", "key"), b"")


def test_a_trigger_in_the_index_is_refused(tmp_path: Path) -> None:
    store = ChunkStore.open(tmp_path / "store", limit_bytes=2**24)
    store.close()
    sql(store, "CREATE TRIGGER t AFTER UPDATE ON Cache BEGIN DELETE FROM Cache; END")
    with pytest.raises(IntegrityError, match="'t'"):
        ChunkStore.open(tmp_path / "store")


@pytest.mark.parametrize(
    "name", ["kv", "kv/partial", "kv/cache.db", "catalog.db", "kv/cache.db-wal"]
)
def test_links_in_the_place_of_our_own_files_are_refused(tmp_path: Path, name: str) -> None:
    ChunkStore.open(tmp_path / "store", limit_bytes=2**24).close()
    place, elsewhere = tmp_path / "store" / name, tmp_path / "elsewhere"
    if place.exists():
        place.rename(elsewhere)
    place.symlink_to(elsewhere)
    with pytest.raises(IntegrityError, match=place.name):
        ChunkStore.open(tmp_path / "store")


def test_folders_and_files_are_the_owners_alone(store: ChunkStore) -> None:
    old = os.umask(0)
    try:
        with ChunkStore.open(store.path.parent / "open", limit_bytes=2**24) as other:
            put(other, IDS)
            other.catalog.name_model("f", "n")
            for path in (other.path, *other.path.rglob("*")):
                wanted = 0o700 if path.is_dir() else 0o600
                assert path.stat().st_mode & 0o777 == wanted, path
            other.path.chmod(0o755)
        ChunkStore.open(other.path).close()
        assert other.path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


def test_plain_files_are_written_whole_too(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    disk = ChunkDisk(str(tmp_path))
    size, mode, name, value = disk.store(io.BytesIO(b"x" * 5000), True, KEY)
    assert (size, mode, value) == (8192, 2, None)
    assert disk.fetch(mode, name, value, False) == b"x" * 5000
    with disk.fetch(mode, name, value, True) as file:
        assert file.read() == b"x" * 5000

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        disk.store(Broken(), True, KEY)
    assert name is not None
    disk.remove(name)
    assert [path.name for path in tmp_path.rglob("*")] == ["partial"]


def test_a_staged_file_takes_its_space_and_goes_unless_published(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    name = ChunkDisk(str(tmp_path)).new_name(KEY)
    staged = StagedFile(tmp_path, name, 100_000)
    (path,) = (tmp_path / "partial").iterdir()
    assert path.stat().st_blocks * 512 >= 100_000
    assert not is_abandoned(path)
    staged.close()
    staged.close()
    assert not path.exists()
    path.write_bytes(b"left by a writer that was killed")
    assert is_abandoned(path)
    path.unlink()
    path.symlink_to(tmp_path)
    assert is_abandoned(path)


def test_a_full_disk_is_said_in_one_line(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = put(store, IDS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("posix_fallocate", "pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(CacheblendError, match="no space left on the disk"):
                put(store, (1, 2))
        assert list((store.path / "kv" / "partial").iterdir()) == []
        assert len(files(store)) == 1
    assert read(store, kept)
    put(store, (1, 2))
    assert store.verify().ok == 2
