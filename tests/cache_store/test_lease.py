"""What a living process uses stays, whoever makes room; what a killed one used doesn't."""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache_store.errors import StoreFullError
from cache_store.index import EntryRow
from cache_store.lease import LEASES
from cache_store.space import BLOCK
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, ended, in_child, make_layers, put, read

LIMIT = 6 * 2**20
LAYERS = make_layers(BIG, 8)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "small", limit_bytes=LIMIT) as store:
        yield store


def big(store: ChunkStore, number: int, *, saved: bool = False) -> str:
    return store.put(BIG, [number] * 8, (), "", LAYERS, chunk_id=f"{number}", saved=saved)


def keys(store: ChunkStore) -> set[str]:
    return {entry.key for entry in store.entries()}


def fill(store: ChunkStore, numbers: range) -> None:
    for number in numbers:
        big(store, number)


def hold_all(store: ChunkStore, numbers: range) -> None:
    for number in numbers:
        store.protect(big(store, number))


def leases(store: ChunkStore) -> list[Path]:
    folder = store.path / "kv" / LEASES
    return sorted(folder.iterdir()) if folder.exists() else []


@contextmanager
def another(root: Path, work: Callable[[ChunkStore], object]) -> Iterator[int]:
    """A process that did `work` on the store and lives on with it open, until it is killed."""
    ready, told = os.pipe()

    def live() -> None:
        store = ChunkStore.open(root)
        kept = work(store)
        os.write(told, b"x")
        while kept is not store:  # both are needed until the end
            time.sleep(1)

    child = in_child(live)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"x"
        yield child
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL


def test_what_another_process_protects_stays_until_it_is_killed(small: ChunkStore) -> None:
    stored = [big(small, number) for number in range(4)]

    def protect(store: ChunkStore) -> None:
        for key in stored[:2]:
            store.protect(key)

    with another(small.path, protect):
        fill(small, range(10, 27))
        assert set(stored) & keys(small) == set(stored[:2])
        assert small.discard(stored[0]) == 0
        assert stored[0] in keys(small)
        assert small.used_bytes() <= LIMIT
    fill(small, range(50, 75))
    assert not set(stored) & keys(small)
    assert leases(small) == [] or small.verify(repair=True).problems == ()


def test_what_another_process_reads_stays_until_it_is_killed(small: ChunkStore) -> None:
    stored = [big(small, number) for number in range(4)]
    with another(small.path, lambda store: [store.open_entry(key) for key in stored[:2]]):
        fill(small, range(10, 27))
        assert set(stored) & keys(small) == set(stored[:2])
        assert small.discard(stored[1]) == 0
        assert read(small, stored[0])[1] == LAYERS
    fill(small, range(50, 75))
    assert not set(stored) & keys(small)


def test_a_closed_reader_lets_its_entry_go_to_others(small: ChunkStore) -> None:
    key = big(small, 0)

    def look(store: ChunkStore) -> None:
        assert read(store, key)[1] == LAYERS

    with another(small.path, look):
        fill(small, range(10, 27))
        assert key not in keys(small)


def test_an_entry_that_is_read_here_is_not_discarded(small: ChunkStore) -> None:
    key = big(small, 0)
    with small.open_entry(key):
        assert small.discard(key) == 0
    assert small.has_entry(key)
    assert small.discard(key) > 0
    assert not small.has_entry(key)


def test_a_store_full_of_others_entries_refuses_and_names_the_limit(small: ChunkStore) -> None:
    stored = [big(small, number) for number in range(15)]
    present = keys(small)

    def protect(store: ChunkStore) -> None:
        for key in stored:
            store.protect(key)

    with another(small.path, protect):
        with pytest.raises(StoreFullError, match=str(LIMIT)):
            hold_all(small, range(100, 130))
        assert present <= keys(small)
        with pytest.raises(StoreFullError, match="limit"):
            small.require_room(LIMIT // 2)
    big(small, 200)
    assert not present <= keys(small)


def test_a_lease_is_a_small_private_file_that_goes_with_its_store(small: ChunkStore) -> None:
    assert leases(small) == []
    with ChunkStore.open(small.path) as other:
        for number in range(3):
            other.protect(big(other, number))
        (file,) = leases(small)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert file.stat().st_blocks * 512 <= 4096
        assert small.verify().problems == ()
    assert leases(small) == []


def test_many_keys_are_listed_and_counted(store: ChunkStore) -> None:
    keep = [put(store, (number,)) for number in range(70)]
    for key in keep:
        store.protect(key)
    (file,) = leases(store)
    assert file.stat().st_size >= 66 * len(keep)
    with ChunkStore.open(store.path) as other:
        assert other._space.leases.listed() == set(keep)
        counted = other._space._counted(anew=True)
    store._space.lease.close()
    assert counted - store._space._counted(anew=True) >= 4096


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"\0" * 4096,
        b"=abc\n",
        b"x" * 70_000,
        b"=" + b"g" * 64 + b"\n",
        b"=" + b"A" * 64 + b"\n",
    ],
    ids=["empty", "zeros", "short", "long", "not-hex", "capitals"],
)
def test_only_well_formed_lines_of_the_living_count(small: ChunkStore, lines: bytes) -> None:
    key, other = big(small, 0), big(small, 1)
    folder = small.path / "kv" / LEASES

    def list_it(store: ChunkStore) -> object:
        store.protect(other)
        (own,) = leases(store)
        with own.open("r+b") as file:
            file.seek(66)
            file.write(lines + b"\n=" + key[:63].encode() + b"\n")
        return own

    with another(small.path, list_it):
        assert small._space.leases.listed() == {other}
    (folder / "0123456789abcdef.lease").write_bytes(b"=" + key.encode() + b"\n")  # nobody's
    assert small._space.leases.listed() == set()
    (folder / "somebody").write_bytes(b"=" + key.encode() + b"\n")
    fill(small, range(10, 27))
    assert key not in keys(small)
    assert [path.name for path in leases(small)] == ["somebody"]


def test_leases_behind_a_link_are_neither_written_nor_swept(
    small: ChunkStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0123456789abcdef.lease").write_bytes(b"")
    (small.path / "kv" / LEASES).symlink_to(outside)
    key = big(small, 0)
    small.protect(key)  # here it holds all the same
    fill(small, range(10, 27))
    assert key in keys(small)
    assert [path.name for path in outside.iterdir()] == ["0123456789abcdef.lease"]


def test_what_is_being_computed_is_claimed_once(small: ChunkStore) -> None:
    key = "a" * 64
    with another(small.path, lambda store: store.claim(key)):
        assert not small.claim(key)
        assert small.claim("b" * 64)
    assert small.claim(key)  # a killed process's claims count for nothing
    with ChunkStore.open(small.path) as other:
        assert not other.claim(key)
    small.protect(key)  # it is stored
    with ChunkStore.open(small.path) as other:
        assert other.claim(key)


def test_a_claim_in_a_store_without_room_for_it_is_made_all_the_same(small: ChunkStore) -> None:
    fill(small, range(40))
    small.set_eviction("none")
    small._index.set_limit(small._space._counted(anew=True) + BLOCK)
    assert small.claim("a" * 64)
    assert leases(small) == []
    assert small.verify().problems == ()


def test_threads_claim_and_protect_without_waiting_for_each_other(small: ChunkStore) -> None:
    small.protect("f" * 64)
    index, began = small._index, threading.Event()
    many = [f"{number:064x}" for number in range(200)]  # the file has to grow
    listed: list[bool] = []

    def protect() -> None:
        began.wait()
        listed.append(small._space.lease.add(many))

    other = threading.Thread(target=protect)
    other.start()
    transaction = index.transaction

    @contextmanager
    def slow() -> Iterator[None]:
        with transaction():
            began.set()
            time.sleep(0.1)  # the other is waiting by now
            yield

    index.transaction = slow  # type: ignore[method-assign, assignment]
    assert small.claim("e" * 64)
    index.transaction = transaction  # type: ignore[method-assign]
    other.join()
    assert listed == [True]  # it had its turn: neither gave up for the other


def test_a_transaction_within_another_is_part_of_it(small: ChunkStore) -> None:
    fill(small, range(2))
    first, second = small._index.entries()
    assert isinstance(first, EntryRow)
    assert isinstance(second, EntryRow)

    def fail() -> None:
        with small._index.transaction():
            small._index.delete(first.key)
            with small._index.transaction():
                small._index.delete(second.key)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert keys(small) == {first.key, second.key}
    assert all(row.path.exists() for row in (first, second))


def test_a_forked_process_has_leases_of_its_own(small: ChunkStore) -> None:
    first, second = big(small, 0), big(small, 1)
    small.protect(first)

    def work() -> None:
        small.protect(second)
        assert len(leases(small)) == 2
        small.close()
        assert len(leases(small)) == 1

    assert ended(in_child(work)) == 0
    with ChunkStore.open(small.path) as other:
        assert other._space.leases.listed() == {first}
