"""Two machines over one remote, and everything the remote may do to them."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_store.errors import NotFoundError
from cache_store.keys import entry_key, group_key
from cache_store.store import ChunkStore
from cache_store.tiers import reader as reader_module
from cache_store.tiers import tiered as tiered_module
from cache_store.tiers.breaker import Breaker
from cache_store.tiers.naming import entry_name
from cache_store.tiers.protocol import LostEntry, RemoteError, RemoteRefused
from cache_store.tiers.remote import RemoteTier
from cache_store.tiers.tiered import TieredStore, open_tiered
from tests.cache_store.support import BIG, CONTEXT, SPEC, file_of, flip, in_child, make_layers, put
from tests.cache_store.tiers.shelf import Hangs, Shelf, fails, machine

IDS = tuple(range(10, 40))
MORE = tuple(range(50, 80))


def place(ids=IDS, spec=SPEC, context=CONTEXT) -> tuple[str, str]:
    group = group_key(spec, ids)
    return group, entry_key(group, context, "")


def name_of(ids=IDS, spec=SPEC) -> str:
    return entry_name(*place(ids, spec))


def layers_read(store: TieredStore, key: str):
    with store.open_entry(key) as reader:
        spec = reader.header.spec
        found = [tuple(map(bytes, reader.layer(i))) for i in range(spec.layers)]
        return reader.tier, found


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def filled(tmp_path: Path, shelf: Shelf) -> Shelf:
    """The shelf, with two chunks that machine A stored."""
    with machine(tmp_path / "a", shelf) as a:
        put(a, IDS)
        put(a, MORE)
        assert a.push() == 0
    shelf.requests.clear()
    return shelf


@pytest.fixture
def b(tmp_path: Path, filled: Shelf) -> Iterator[TieredStore]:
    with machine(tmp_path / "b", filled) as store:
        yield store


def test_what_one_machine_stored_another_reads_and_keeps(
    tmp_path: Path, filled: Shelf, b: TieredStore
) -> None:
    b.look_ahead(SPEC, [IDS, MORE])
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    assert (match.key, match.exact, match.context) == (place()[1], True, CONTEXT)
    assert layers_read(b, match.key) == ("remote", make_layers(SPEC, len(IDS)))
    b.settle()
    assert layers_read(b, match.key) == ("disk", make_layers(SPEC, len(IDS)))
    with ChunkStore.open(tmp_path / "a", read_only=True) as a:
        assert file_of(a, match.key).read_bytes() == file_of(b, match.key).read_bytes()
    assert b.take_notes() == []


def test_the_object_is_the_chunk_file_unchanged(tmp_path: Path, filled: Shelf) -> None:
    with ChunkStore.open(tmp_path / "a", read_only=True) as a:
        assert filled.objects[name_of()] == file_of(a, place()[1]).read_bytes()


def test_a_prompt_is_looked_up_in_two_requests(filled: Shelf, b: TieredStore) -> None:
    b.look_ahead(SPEC, [IDS, MORE, (1, 2), (3, 4)])
    for ids in (IDS, MORE, (1, 2), (3, 4)):
        b.find(SPEC, ids, CONTEXT)
    b.look_ahead(SPEC, [IDS, MORE, (1, 2), (3, 4)])
    assert [request[0] for request in filled.requests] == ["names", "heads"]


def test_the_best_context_of_the_remote_is_taken(tmp_path: Path, shelf: Shelf) -> None:
    with machine(tmp_path / "a", shelf) as a:
        for context in ((), (1,), (9, 9)):
            put(a, IDS, context)
        assert a.push() == 0
    with machine(tmp_path / "b", shelf) as b:
        match = b.find(SPEC, IDS, CONTEXT)
        assert match is not None
        assert (match.context, match.shared, match.exact) == ((1,), 1, False)
        assert b.find(SPEC, IDS, CONTEXT, strict_context=CONTEXT) is None


def test_what_is_here_is_not_asked_of_the_remote(filled: Shelf, b: TieredStore) -> None:
    put(b, IDS, (7,))
    b.settle()
    filled.requests.clear()
    b.look_ahead(SPEC, [IDS])
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    assert match.context == (7,)  # though the remote has an exact one
    assert filled.count("names", "get") == 0
    assert b.find_here(SPEC, IDS, CONTEXT) == match
    assert b.find_here(SPEC, MORE, CONTEXT) is None
    assert filled.requests == []


def test_layers_are_read_one_after_the_other(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(range(100))  # 800 kB a layer
    monkeypatch.setattr(reader_module, "_AHEAD", 1)
    with machine(tmp_path / "a", shelf) as a:
        put(a, ids, spec=BIG)
        assert a.push() == 0
    with machine(tmp_path / "b", shelf) as b:
        match = b.find(BIG, ids, CONTEXT)
        assert match is not None
        shelf.requests.clear()
        with b.open_entry(match.key) as reader:
            for index in range(BIG.layers):
                reader.layer(index)
                asked = max(start + length for _, _, start, length in shelf.requests)
                ahead = min(index + 2, BIG.layers)
                assert asked <= reader.header.header_bytes + ahead * BIG.layer_bytes(len(ids))
        assert shelf.count("get") == BIG.layers


def test_a_reader_closed_early_still_brings_the_whole_entry(b: TieredStore) -> None:
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    b.open_entry(match.key).close()
    b.settle()
    assert layers_read(b, match.key) == ("disk", make_layers(SPEC, len(IDS)))


def test_closing_asks_a_slow_remote_for_nothing_more(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "SPAN_BYTES", 1)  # each layer by itself
    monkeypatch.setattr(tiered_module, "CLOSE_SECONDS", 0.05)
    with machine(tmp_path / "a", shelf) as a:
        put(a, IDS, spec=BIG)
        assert a.push() == 0
    b = machine(tmp_path / "b", shelf)
    match = b.find(BIG, IDS, CONTEXT)
    assert match is not None
    closing = threading.Event()
    leave = b._background.settle

    def slow(operation: str) -> None:
        if operation == "get":
            closing.wait(10)

    def settle(seconds: float | None = None) -> None:
        leave(seconds)
        threading.Timer(0.2, closing.set).start()  # by then it has given up

    monkeypatch.setattr(b._background, "settle", settle)
    shelf.requests.clear()
    shelf.before = slow
    b.open_entry(match.key).close()
    b.close()
    assert shelf.count("get") <= 2 < BIG.layers


# Downloads for an ingest.


def test_many_entries_are_brought_with_one_look_up(tmp_path: Path, shelf: Shelf) -> None:
    with machine(tmp_path / "a", shelf) as a:
        chunks = [tuple(range(n, n + 5)) for n in range(40)]
        for ids in chunks:
            put(a, ids)
        assert a.push() == 0
    shelf.requests.clear()
    seen: list[int] = []
    with machine(tmp_path / "b", shelf) as b:
        put(b, chunks[0])
        wanted = [place(ids) for ids in [*chunks, (900, 901)]]
        assert b.bring(wanted, seen.append) == {key for _, key in wanted[:-1]}
        assert seen == sorted(seen)
        assert len(seen) == 39
        b.uploads.wait(5)
    assert shelf.count("names") == 1
    with ChunkStore.open(tmp_path / "b", read_only=True) as alone:  # they are on the disk now
        assert all(alone.contains(SPEC, ids, CONTEXT) for ids in chunks)


def test_bringing_from_a_remote_that_fails_brings_what_came(filled: Shelf, b: TieredStore) -> None:
    filled.before = fails("names")
    assert b.bring([place(), place(MORE)]) == set()
    assert len(b.take_notes()) == 1
    filled.before = lambda operation: None
    filled.objects[name_of(MORE)] = filled.objects[name_of(MORE)][:-1]
    assert b.bring([place(), place(MORE)]) == {place()[1]}


# A remote that lies.


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_header(data: bytes) -> bytes:
    return data[:20]


def bit(position: int) -> Callable[[bytes], bytes]:
    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 4
        return bytes(changed)

    return flipped


@pytest.mark.parametrize(
    "change",
    [cut, cut_header, bit(3), bit(8), bit(13), bit(40), bit(200), bit(-1), bit(-3000)],
    ids=lambda change: change.__name__,
)
def test_a_changed_object_is_a_miss_and_nothing_else(
    change: Callable[[bytes], bytes], filled: Shelf, b: TieredStore
) -> None:
    filled.objects[name_of()] = change(filled.objects[name_of()])
    b.look_ahead(SPEC, [IDS, MORE])
    match = b.find(SPEC, IDS, CONTEXT)
    if match is not None:
        with pytest.raises(LostEntry):
            layers_read(b, match.key)
        assert b.find(SPEC, IDS, CONTEXT) is None  # not a second time
    assert len(b.take_notes()) == 1
    other = b.find(SPEC, MORE, CONTEXT)
    assert other is not None
    assert layers_read(b, other.key)[1] == make_layers(SPEC, len(MORE))
    assert name_of() in filled.objects  # it isn't ours to remove
    b.settle()
    assert not b.contains(SPEC, IDS, CONTEXT)


def test_two_objects_changed_for_each_other_are_misses(filled: Shelf, b: TieredStore) -> None:
    objects = filled.objects
    objects[name_of()], objects[name_of(MORE)] = objects[name_of(MORE)], objects[name_of()]
    assert b.find(SPEC, IDS, CONTEXT) is None
    assert b.find(SPEC, MORE, CONTEXT) is None


def test_a_changed_object_is_put_right_by_who_computes_it(filled: Shelf, b: TieredStore) -> None:
    good = filled.objects[name_of()]
    filled.objects[name_of()] = bit(-1)(good)
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    with pytest.raises(LostEntry):
        layers_read(b, match.key)
    put(b, IDS)
    assert b.push() == 0
    assert filled.objects[name_of()] == good


def test_an_object_that_went_away_is_a_miss(filled: Shelf, b: TieredStore) -> None:
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    del filled.objects[name_of()]
    with pytest.raises(LostEntry):
        layers_read(b, match.key)
    b.settle()
    with pytest.raises((LostEntry, NotFoundError)):
        b.open_entry(match.key)


# A remote that is slow or down.


def test_a_slow_look_up_is_waited_for_once_a_prompt(tmp_path: Path, filled: Shelf) -> None:
    with machine(tmp_path / "b", filled, timeout=0.05) as b, Hangs() as filled.before:
        b.look_ahead(SPEC, [IDS, MORE])
        assert b.find(SPEC, IDS, CONTEXT) is None
        assert b.find(SPEC, MORE, CONTEXT) is None
        assert len(filled.requests) == 1
        assert b.take_notes() == ["shelf://here was too slow; the remote store was done without"]


def test_a_prompt_waits_no_longer_than_it_may(tmp_path: Path, filled: Shelf) -> None:
    with machine(tmp_path / "b", filled, timeout=5) as b:
        b.look_ahead(SPEC, [IDS, MORE], 0.2)
        match = b.find(SPEC, IDS, CONTEXT)
        assert match is not None
        with Hangs() as filled.before:
            with pytest.raises(LostEntry):
                layers_read(b, match.key)
            assert b.find(SPEC, MORE, CONTEXT) is None
        filled.before = lambda operation: None
        b.look_ahead(SPEC, [IDS, MORE], 0.2)  # the next prompt asks again
        assert b.find(SPEC, IDS, CONTEXT) is not None


def test_a_connection_lost_between_layers_is_a_miss(
    filled: Shelf, b: TieredStore, monkeypatch
) -> None:
    monkeypatch.setattr(reader_module, "SPAN_BYTES", 1)
    monkeypatch.setattr(reader_module, "_AHEAD", 0)
    match = b.find(SPEC, IDS, CONTEXT)
    assert match is not None
    with b.open_entry(match.key) as reader:
        assert bytes(reader.layer(0)[0]) == make_layers(SPEC, len(IDS))[0][0]
        filled.before = fails()
        with pytest.raises(LostEntry, match="connection lost"):
            reader.layer(1)
    assert b.find(SPEC, IDS, CONTEXT) is None
    assert len(b.take_notes()) == 1
    b.settle()
    assert not b.contains(SPEC, IDS, CONTEXT)


def test_after_failures_the_remote_is_left_alone_for_a_while(tmp_path: Path, filled: Shelf) -> None:
    now = [0.0]
    breaker = Breaker(failures=2, rest=30, clock=lambda: now[0])
    with machine(tmp_path / "b", filled, breaker=breaker) as b:

        def ask() -> bool:
            b.look_ahead(SPEC, [IDS])
            return b.find(SPEC, IDS, CONTEXT) is not None

        filled.before = fails()
        assert not ask()
        assert not ask()
        b.take_notes()
        asked = len(filled.requests)
        filled.before = lambda operation: None
        assert not ask()
        assert len(filled.requests) == asked  # not even tried
        assert "asked again in 30 s" in b.take_notes()[0]
        now[0] = 31
        assert ask()


# Uploads.


def test_a_full_remote_costs_nothing_but_a_note(tmp_path: Path, shelf: Shelf) -> None:
    def full(operation: str) -> None:
        if operation == "put":
            raise RemoteRefused("shelf://here: no room")

    shelf.before = full
    store = machine(tmp_path / "a", shelf)
    key = put(store, IDS)
    store.uploads.wait(5)
    store.close()
    assert store.take_notes() == ["1 entries are still to be uploaded (cacheblend store push)"]
    shelf.before = lambda operation: None
    with machine(tmp_path / "a", shelf) as again:
        assert again.tiers()[-1].pending == 1
        assert layers_read(again, key)[0] == "disk"
        put(again, MORE)  # the next writer takes what was left along
        assert again.uploads.wait(5) == 0
    assert set(shelf.objects) == {name_of(), name_of(MORE)}


def test_a_killed_process_leaves_its_uploads_to_the_next(tmp_path: Path, shelf: Shelf) -> None:
    def work() -> None:
        shelf.before = Hangs("put", "heads")
        put(machine(tmp_path / "a", shelf), IDS)
        os.kill(os.getpid(), 9)

    child = in_child(work)
    os.waitpid(child, 0)
    with machine(tmp_path / "a", shelf) as a:
        assert a.contains(SPEC, IDS, CONTEXT)
        assert a.push() == 0
    assert set(shelf.objects) == {name_of()}


def test_damage_is_not_uploaded(tmp_path: Path, shelf: Shelf) -> None:
    with ChunkStore.open(tmp_path / "a", limit_bytes=2**28) as plain:
        key = put(plain, IDS)
        put(plain, MORE)
        flip(file_of(plain, key), -1)
    with machine(tmp_path / "a", shelf) as a:
        assert a.push(everything=True) == 0
    assert set(shelf.objects) == {name_of(MORE)}


def test_removing_here_leaves_the_remote_alone(filled: Shelf, b: TieredStore) -> None:
    b.bring([place()])
    assert b.discard(place()[1]) > 0
    assert name_of() in filled.objects


def test_a_store_that_cannot_be_written_reads_the_remote(tmp_path: Path, filled: Shelf) -> None:
    ChunkStore.open(tmp_path / "b", limit_bytes=2**28).close()
    with machine(tmp_path / "b", filled, read_only=True) as b:
        match = b.find(SPEC, IDS, CONTEXT)
        assert match is not None
        assert layers_read(b, match.key) == ("remote", make_layers(SPEC, len(IDS)))
        b.settle()
        assert b.bring([place()]) == set()


# Memory.


def test_memory_serves_the_second_prompt_until_the_entry_leaves_the_disk(tmp_path: Path) -> None:
    # Without a remote: an entry that is being uploaded is in use, and stays.
    with open_tiered(tmp_path / "a", memory_limit=2**20, limit_bytes=2**28) as a:
        key = put(a, IDS)
        expected = make_layers(SPEC, len(IDS))
        assert layers_read(a, key) == ("disk", expected)
        a.settle()
        assert layers_read(a, key) == ("memory", expected)
        assert a.memory.used == len(IDS) * SPEC.token_bytes
        a.discard(key)
        assert a.memory.used == 0
        with pytest.raises((NotFoundError, LostEntry)):
            a.open_entry(key)


def test_what_another_process_evicted_is_not_served_from_memory(
    tmp_path: Path, shelf: Shelf
) -> None:
    with machine(tmp_path / "a", Shelf(), memory=2**20) as a:
        key = put(a, IDS)
        assert a.warm([key]) > 0
        with ChunkStore.open(tmp_path / "a") as other:
            other.discard(key)
        with pytest.raises((NotFoundError, LostEntry)):
            a.open_entry(key)
        assert a.memory.used == 0


def test_chunks_of_no_document_are_remembered_when_read_twice(tmp_path: Path) -> None:
    with machine(tmp_path / "a", Shelf(), memory=2**20) as a:
        one_off = put(a, IDS, chunk_id="e" * 64)
        for tier in ("disk", "disk", "memory"):
            assert layers_read(a, one_off)[0] == tier
            a.settle()


def test_threads_that_wait_for_one_answer_all_do_without_it(shelf: Shelf) -> None:
    tier = RemoteTier(lambda seconds: shelf, 5.0)
    with Hangs("get") as shelf.before:
        for _ in range(16):  # as many as are under way at a time
            tier.submit(lambda: shelf.get("a", 0, 1))
        late = tier.submit(lambda: shelf.get("b", 0, 1))
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                tier.wait(late)
            except BaseException as error:
                errors.append(error)

        other = threading.Thread(target=wait)
        other.start()
        with pytest.raises(RemoteError):
            tier.wait(late, longest=0.1)
        other.join()
    tier.close()
    assert [type(error) for error in errors] == [RemoteError]
