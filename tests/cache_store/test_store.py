import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import (
    CacheblendError,
    DamagedEntry,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from cache_store.group import Group, Member, ranked, shared_length
from cache_store.place import default_limit
from cache_store.store import ChunkStore
from tests.cache_store.support import (
    CONTEXT,
    SPEC,
    change,
    file_of,
    files,
    flip,
    hurry,
    make_layers,
    put,
    read,
)

IDS = (10, 11, 12, 13)


def test_what_is_put_can_be_found_and_read(store: ChunkStore) -> None:
    key = put(store, IDS, regime="long", chunk_id="c" * 64)
    match = store.find(SPEC, IDS, CONTEXT, regime="long")
    assert match is not None
    assert (match.key, match.shared, match.exact) == (key, 3, True)
    assert (match.context, match.regime) == (CONTEXT, "long")
    assert match.nbytes == files(store)[0].stat().st_size
    header, layers = read(store, key)
    assert (header.spec, header.token_ids, header.context) == (SPEC, IDS, CONTEXT)
    assert header.chunk_id == "c" * 64
    assert layers == make_layers(SPEC, 4)


def test_it_is_there_after_reopening(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", limit_bytes=2**24) as store:
        key = put(store, IDS)
    with ChunkStore.open(tmp_path / "s") as store:
        assert read(store, key)[1] == make_layers(SPEC, 4)
        assert store.limit == 2**24
        assert store.contains(SPEC, IDS, CONTEXT)


def test_putting_twice_changes_nothing(store: ChunkStore) -> None:
    key = put(store, IDS)
    before = [(path.name, path.stat().st_mtime_ns) for path in files(store)]
    assert put(store, IDS) == key
    assert [(path.name, path.stat().st_mtime_ns) for path in files(store)] == before
    assert len(list(store.entries())) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"tokenizer": "another"},
        {"dtype": "bf16"},
        {"kv_heads": 4, "head_dim": 2},
        {"layers": 2},
    ],
)
def test_another_models_kv_is_never_served(store: ChunkStore, other: dict[str, object]) -> None:
    put(store, IDS)
    spec = replace(SPEC, **other)
    assert store.find(spec, IDS, CONTEXT) is None
    assert not store.contains(spec, IDS, CONTEXT)
    key = put(store, IDS, spec=spec)
    match = store.find(spec, IDS, CONTEXT)
    assert match is not None
    assert match.key == key
    assert len(list(store.entries())) == 2


def test_other_tokens_are_not_found(store: ChunkStore) -> None:
    put(store, IDS)
    for ids in ((), IDS[:-1], (*IDS, 1), IDS[::-1]):
        assert store.find(SPEC, ids, CONTEXT) is None


def test_the_longest_shared_context_wins(store: ChunkStore) -> None:
    contexts = [(), (1,), (1, 2, 3), (1, 2, 9, 9), (5,)]
    keys = {context: put(store, IDS, context) for context in contexts}

    def found(context: tuple[int, ...]) -> tuple[str, int, bool]:
        match = store.find(SPEC, IDS, context)
        assert match is not None
        return match.key, match.shared, match.exact

    assert found((1, 2, 3)) == (keys[(1, 2, 3)], 3, True)
    assert found((1, 2, 3, 4)) == (keys[(1, 2, 3)], 3, False)
    assert found((1, 2, 9)) == (keys[(1, 2, 9, 9)], 3, False)
    assert found((1, 7)) == (keys[(1,)], 1, False)
    assert found(()) == (keys[()], 0, True)
    assert found((8,)) == (keys[()], 0, False)  # another system prompt still hits


def test_exact_needs_the_regime_and_is_preferred(store: ChunkStore) -> None:
    short, long = put(store, IDS, regime="short"), put(store, IDS, regime="long")
    for regime, key in (("short", short), ("long", long)):
        match = store.find(SPEC, IDS, CONTEXT, regime=regime)
        assert match is not None
        assert (match.key, match.exact) == (key, True)
    match = store.find(SPEC, IDS, CONTEXT, regime="other")
    assert match is not None
    assert not match.exact
    assert store.contains(SPEC, IDS, CONTEXT, "long")
    assert not store.contains(SPEC, IDS, CONTEXT, "other")


def test_strict_context_refuses_all_others(store: ChunkStore) -> None:
    put(store, IDS, (1, 2))
    key = put(store, IDS, (1,))
    behind = (1, 2, 50, 51)
    match = store.find(SPEC, IDS, behind, strict_context=(1,))
    assert match is not None
    assert (match.key, match.shared, match.exact) == (key, 1, False)
    assert store.find(SPEC, IDS, behind, strict_context=()) is None
    assert store.find(SPEC, IDS, behind, strict_context=(1, 2, 50)) is None


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_shared_length_is_the_common_prefix(one: list[int], other: list[int]) -> None:
    shared = shared_length(one, other)
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or one == other


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from("ab"))),
    st.lists(st.integers(0, 1), max_size=4),
    st.randoms(),
)
def test_the_choice_does_not_depend_on_the_order(
    entries: list[tuple[list[int], str]], context: list[int], random: object
) -> None:
    members = [Member(f"{n}", tuple(c), regime) for n, (c, regime) in enumerate(entries)]
    best = ranked(members, context, "a")
    random.shuffle(members)  # type: ignore[attr-defined]
    assert ranked(members, context, "a") == best
    if best:
        exact = [m for m in members if (m.context, m.regime) == (tuple(context), "a")]
        most = max(shared_length(m.context, context) for m in members)
        assert best[0] in exact or (not exact and shared_length(best[0].context, context) == most)


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"[]", b"\xff", b'{"v":2}', b"[" * 5000, b'{"v":1,"spec":{},"entries":[]}'],
)
def test_a_list_of_entries_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(IntegrityError, match="damaged"):
        Group.decode("0" * 64, value)


# Damage


def damaged_ways() -> Iterator[object]:
    yield "missing", Path.unlink
    yield "empty", lambda path: path.write_bytes(b"")
    yield "cut", lambda path: path.write_bytes(path.read_bytes()[:-1])
    yield "header", lambda path: flip(path, 100)
    yield "foreign", lambda path: path.write_text("a shopping list")


@pytest.mark.parametrize(("name", "harm"), list(damaged_ways()))
def test_damage_is_a_miss_and_can_be_put_right(store: ChunkStore, name: str, harm: object) -> None:
    key = put(store, IDS)
    harm(file_of(store, key))  # type: ignore[operator]
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert not store.contains(SPEC, IDS, CONTEXT)
    assert len(store.damaged) == 1
    assert key in store.damaged[0]
    with pytest.raises(DamagedEntry):
        store.open_entry(key)
    assert put(store, IDS) == key  # put again without being discarded first
    assert read(store, key)[1] == make_layers(SPEC, 4)
    assert store.verify().problems == ()
    assert len(files(store)) == 1


def test_damaged_layers_are_found_when_read(store: ChunkStore) -> None:
    key = put(store, IDS)
    flip(file_of(store, key), -1)
    match = store.find(SPEC, IDS, CONTEXT)
    assert match is not None
    with store.open_entry(key) as reader:
        reader.layer(0)
        with pytest.raises(DamagedEntry, match="layer 2"):
            reader.layer(2)
    assert store.discard(key) > 0
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert files(store) == []


def test_a_damaged_entry_gives_way_to_the_next_best(store: ChunkStore) -> None:
    best, other = put(store, IDS, (1, 2)), put(store, IDS, (1,))
    flip(file_of(store, best), 20)
    match = store.find(SPEC, IDS, (1, 2))
    assert match is not None
    assert (match.key, match.shared) == (other, 1)


def test_files_that_changed_places_are_found(store: ChunkStore) -> None:
    """Sound files under each other's names: a hash hit, but other tokens."""
    one, two = put(store, IDS), put(store, IDS[::-1])
    a, b = file_of(store, one), file_of(store, two)
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert not store.contains(SPEC, IDS, CONTEXT)
    assert "holds another chunk" in store.damaged[0]
    with pytest.raises(DamagedEntry, match="holds another chunk"):
        store.open_entry(one)
    report = store.verify()
    assert {problem.where for problem in report.problems} == {one, two}


def test_another_format_version_is_a_miss(store: ChunkStore) -> None:
    key = put(store, IDS)
    change(file_of(store, key), lambda data: data.__setitem__(8, 9))
    assert store.find(SPEC, IDS, CONTEXT) is None
    assert "format version 9" in store.damaged[0]


# Discarding and looking over


def test_discard_removes_one_entry_and_says_what_it_freed(store: ChunkStore) -> None:
    one, two = put(store, IDS, (1,)), put(store, IDS, (2,))
    size = file_of(store, one).stat().st_blocks * 512
    assert store.discard(one) == size
    assert store.discard(one) == 0
    assert store.discard("f" * 64) == 0
    match = store.find(SPEC, IDS, (1,))
    assert match is not None
    assert match.key == two
    store.discard(two)
    assert store._index.names() == set()
    assert list(store._index.groups()) == []
    with pytest.raises(NotFoundError, match=two[:12]):
        store.open_entry(two)


def test_an_entry_removed_while_it_is_read_stays_readable(store: ChunkStore) -> None:
    key = put(store, IDS)
    with store.open_entry(key) as reader:
        store.discard(key)
        assert bytes(reader.layer(2)[1]) == make_layers(SPEC, 4)[2][1]


def test_entries_and_stats_tell_what_is_there(store: ChunkStore) -> None:
    key = put(store, IDS, regime="r", chunk_id="c" * 64)
    put(store, (9,), ())
    read(store, key)
    read(store, key)
    first, second = store.entries()
    assert (first.key, first.spec, first.tokens, first.context_tokens) == (key, SPEC, 4, 3)
    assert (first.regime, first.chunk_id, first.hits) == ("r", "c" * 64, 2)
    assert first.nbytes == file_of(store, key).stat().st_blocks * 512
    assert first.used_at > second.used_at
    assert first.stored_at < second.stored_at
    assert second.chunk_id == ""
    assert store.keys_of_chunk("c" * 64) == [key]
    assert store.keys_of_chunk("d" * 64) == []
    store.catalog.name_model(SPEC.model, "tiny")
    stats = store.stats()
    assert (stats.entries, stats.chunks, stats.entry_tokens, stats.hits) == (2, 1, 5, 2)
    assert [(m.name, m.fingerprint, m.dtype) for m in stats.models] == [
        ("tiny", SPEC.model, SPEC.dtype)
    ]
    assert stats.entry_bytes == first.nbytes + second.nbytes
    assert stats.used == store.used_bytes()
    assert stats.oldest_use == second.used_at


def test_numpy_free_and_torch_free() -> None:
    import subprocess
    import sys

    program = (
        "import sys, cache_store.store;"
        "print([m for m in ('torch', 'numpy', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


# Opening


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        ChunkStore.open(tmp_path)
    with pytest.raises(UsageError, match="not a folder"):
        ChunkStore.open(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_reading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no store"):
        ChunkStore.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_store_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "kv").mkdir(parents=True)
    (root / "catalog.db").touch()
    with ChunkStore.open(root, limit_bytes=2**24) as store:
        put(store, IDS)
    (root / "kv" / "cache.db").unlink()
    (root / "kv" / "cache.db").touch()
    with ChunkStore.open(root, limit_bytes=2**24) as store:
        assert store.limit == 2**24
        assert store.find(SPEC, IDS, CONTEXT) is not None  # the file itself tells what it is
        assert [problem.where for problem in store.verify().problems] == ["kv/cache.db"]
    with ChunkStore.open(root) as store:
        assert store.verify().problems == ()


def test_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too small"):
        ChunkStore.open(tmp_path / "store", limit_bytes=1000)
    assert not (tmp_path / "store").exists()


def test_the_default_limit_is_a_tenth_of_the_free_disk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, limit in ((10**9, 10**8), (10**12, 20 * 10**9)):
        monkeypatch.setattr(
            "shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free})
        )
        assert default_limit(tmp_path / "a" / "b") == limit
    with ChunkStore.open(tmp_path / "store") as store:
        assert store.limit == 20 * 10**9


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").symlink_to("nowhere")
    with pytest.raises(UsageError, match="link to nowhere"):
        ChunkStore.open(tmp_path / "store")


def test_a_disk_too_small_for_a_new_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.place.shutil.disk_usage", lambda path: _Usage(6_000_000))
    with pytest.raises(UsageError, match=r"6\.0 MB free") as caught:
        ChunkStore.open(tmp_path / "store")
    assert "cacheblend store limit" in caught.value.hint
    assert not (tmp_path / "store").exists()
    ChunkStore.open(tmp_path / "store", limit_bytes=2**22).close()
    ChunkStore.open(tmp_path / "store").close()  # one that is there needs no more


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


@contextmanager
def unprivileged() -> Iterator[None]:
    """As somebody whom permissions stop."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_store(tmp_path: Path) -> Iterator[Path]:
    """A store everybody may read and nobody may write."""
    root = tmp_path / "store"
    with ChunkStore.open(root, limit_bytes=2**24) as store:
        put(store, IDS)
        store.catalog.name_model(SPEC.model, "tiny")
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    parents = [path for path in root.parents if path.stat().st_uid == os.getuid()]
    modes = [path.stat().st_mode for path in parents]
    for path in parents:
        path.chmod(0o755)
    yield root
    for path, mode in zip(parents, modes, strict=True):
        path.chmod(mode)
    for path in paths:
        path.chmod(0o700)


def test_a_folder_that_cannot_be_written_can_be_read(shared_store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shared_store.rglob("*")}
    with unprivileged(), ChunkStore.open(shared_store) as store:
        assert store.read_only
        match = store.find(SPEC, IDS, CONTEXT)
        assert match is not None
        assert read(store, match.key)[1] == make_layers(SPEC, 4)
        assert store.catalog.model_name(SPEC.model) == "tiny"
        assert store.verify().problems == ()
        assert store.stats().entries == 1
        with pytest.raises(UsageError, match="reading only"):
            put(store, (1,))
    assert {path: path.stat().st_mtime_ns for path in shared_store.rglob("*")} == before


def test_read_only_touches_nothing_and_writes_nothing(store: ChunkStore) -> None:
    key = put(store, IDS)
    with ChunkStore.open(store.path, read_only=True) as reader:
        (before,) = reader.entries()
        read(reader, key)
        assert next(reader.entries()) == before
        put(store, (1, 2))  # it sees what others write meanwhile
        assert reader.contains(SPEC, (1, 2), CONTEXT)
        for write in (
            lambda: put(reader, (3,)),
            lambda: reader.require_writable(),
            lambda: reader.set_limit(2**30),
            lambda: reader.verify(repair=True),
        ):
            with pytest.raises(UsageError, match="reading only"):
                write()
        with pytest.raises(CacheblendError):
            reader.catalog.name_model("f", "n")
    assert store.contains(SPEC, IDS, CONTEXT)


def test_what_is_discarded_where_nothing_can_be_removed_is_passed_over(store: ChunkStore) -> None:
    """So that damage found in a layer is a miss the second time, there too."""
    best, other = put(store, IDS, (1, 2)), put(store, IDS, (1,))
    with ChunkStore.open(store.path, read_only=True) as reader:
        match = reader.find(SPEC, IDS, (1, 2))
        assert match is not None
        assert match.key == best
        assert reader.discard(best) == 0
        match = reader.find(SPEC, IDS, (1, 2))
        assert match is not None
        assert match.key == other
        assert not reader.contains(SPEC, IDS, (1, 2))
    assert store.contains(SPEC, IDS, (1, 2))


def test_a_read_only_store_without_a_catalog_has_an_empty_one(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**24) as store:
        put(store, IDS)
    for path in store.path.glob("catalog.db*"):
        path.unlink()
    with ChunkStore.open(store.path, read_only=True) as reader:
        assert reader.catalog.documents() == []
        assert reader.contains(SPEC, IDS, CONTEXT)


@pytest.mark.parametrize("name", ["kv/cache.db", "catalog.db"])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_that_is_none_is_one_clear_error(
    tmp_path: Path, name: str, read_only: bool
) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**24) as store:
        put(store, IDS)
        store.catalog.name_model("f", "n")
    path = store.path / name
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(IntegrityError, match=f"{path.name} is damaged"):
        ChunkStore.open(store.path, read_only=read_only)


def test_an_index_damaged_within_never_raises_sqlites_own_errors(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**24) as store:
        for n in range(50):
            put(store, (n,))
    path = store.path / "kv" / "cache.db"
    size = path.stat().st_size
    change(path, lambda data: data.__setitem__(slice(4096, size), b"\xa5" * (size - 4096)))
    with (
        pytest.raises(IntegrityError, match="damaged"),
        ChunkStore.open(store.path, read_only=True) as broken,
    ):
        list(broken.entries())


def test_a_locked_store_is_one_clear_error(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = put(store, IDS)
    holder = sqlite3.connect(store.path / "kv" / "cache.db", isolation_level=None)
    other = sqlite3.connect(store.path / "catalog.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    other.execute("BEGIN IMMEDIATE")
    hurry(monkeypatch)
    for write in (
        lambda: put(store, (1,)),
        lambda: store.discard(key),
        lambda: store.catalog.name_model("f", "n"),
    ):
        with pytest.raises(CacheblendError, match="in use by another process"):
            write()
    assert read(store, key)[1] == make_layers(SPEC, 4)  # reading goes on
    holder.execute("ROLLBACK")
    other.execute("ROLLBACK")
    assert put(store, (1,))
    assert list((store.path / "kv" / "partial").iterdir()) == []


def test_threads_share_a_store(store: ChunkStore) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(8):
                ids = (n, number % 2)
                key = put(store, ids, seed=number % 2)
                assert read(store, key)[1] == make_layers(SPEC, 2, number % 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list(store.entries())) == 16
    assert store.verify().problems == ()


def test_opening_entries_writes_nothing_until_uses_are_noted(store: ChunkStore) -> None:
    keys = [put(store, (number,)) for number in range(100)]

    def hits() -> int:
        with ChunkStore.open(store.path, read_only=True) as other:
            return sum(entry.hits for entry in other.entries())

    for key in keys:
        store.open_entry(key).close()
    assert hits() == 0
    store.note_uses()
    assert hits() == 100
