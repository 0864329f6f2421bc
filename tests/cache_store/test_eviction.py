"""What goes first where room is needed, and what never goes."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cache_store.eviction
from cache_store.catalog import ChunkText
from cache_store.errors import StoreFullError, UsageError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, CONTEXT, make_layers, read, scaled

LIMIT = 6 * 2**20
LAYERS = make_layers(BIG, 8)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "small", limit_bytes=LIMIT) as store:
        yield store


def big(store: ChunkStore, number: int, *, saved: bool = False) -> str:
    return store.put(
        BIG, [number] * 8, CONTEXT, "", LAYERS, chunk_id=chunk_id(str(number)), saved=saved
    )


def keys(store: ChunkStore) -> list[str]:
    return [entry.key for entry in store.entries()]


def filled(store: ChunkStore, *, saved: bool = False) -> list[str]:
    """As many entries as fit."""
    before = evictions(store)
    stored: list[str] = []
    while evictions(store) == before:
        stored.append(big(store, 1000 + len(stored), saved=saved))
    return stored[1:]


def hold_all(store: ChunkStore, numbers: range) -> None:
    for number in numbers:
        store.protect(big(store, number))


def evictions(store: ChunkStore) -> int:
    return store.counters.read().get("eviction", 0)


def document(store: ChunkStore, source: str, *numbers: int) -> list[str]:
    """A document of the chunks with these numbers, and their entries."""
    texts = [ChunkText(chunk_id(str(n)), str(n), 0, 1, 8) for n in numbers]
    store.catalog.replace_document(source, "d", "{}", texts)
    return [big(store, n) for n in numbers]


def test_lfu_keeps_what_is_used_often(small: ChunkStore) -> None:
    small.set_eviction("lfu")
    stored = filled(small)
    often = stored[:4]
    for _ in range(3):
        for key in often:
            read(small, key)
    for key in stored[4:]:
        read(small, key)  # later, but once
    for number in range(20):
        read(small, big(small, number))
    assert set(often) <= set(keys(small))
    assert not set(stored[4:]) & set(keys(small))


def test_lfu_takes_the_least_recent_of_equals(small: ChunkStore) -> None:
    small.set_eviction("lfu")
    stored = filled(small)
    for key in reversed(stored):
        read(small, key)
    big(small, 1)
    big(small, 2)
    assert stored[-1] not in keys(small)
    assert stored[0] in keys(small)


def test_popularity_of_long_ago_does_not_stay_for_ever(
    small: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.set_eviction("lfu")
    stored = filled(small)
    for _ in range(7):
        read(small, stored[0])
    for _ in range(2):
        read(small, stored[1])
    small._index.flush()
    for key, weeks in ((stored[0], 4.0), (stored[1], 0.5)):
        small._index._cache._sql(
            "UPDATE Cache SET access_time = ? WHERE key = ?",
            (time.time() - weeks * cache_store.eviction.HALF_LIFE, key),
        )
    for number in range(len(stored) - 4):
        big(small, number)
    assert stored[0] not in keys(small)
    assert stored[1] in keys(small)


def test_none_evicts_nothing_and_refuses(small: ChunkStore) -> None:
    stored = filled(small)
    small.set_eviction("none")
    before = keys(small)
    with pytest.raises(StoreFullError, match="evicts nothing") as caught:
        big(small, 1)
    assert keys(small) == before
    assert stored[-1] in before
    with pytest.raises(StoreFullError, match="evicts nothing"):
        small.set_limit(4 * 2**20)
    assert small.limit == LIMIT
    with pytest.raises(StoreFullError, match="limit"):
        small.require_room(2**20)
    small.set_limit(int(caught.value.hint.split()[-1]))
    big(small, 1)
    assert set(before) < set(keys(small))


def test_the_policy_is_the_stores(small: ChunkStore) -> None:
    assert small.eviction == "lru"
    with ChunkStore.open(small.path) as other:
        other.set_eviction("lfu")
    assert small.eviction == small.stats().eviction == "lfu"
    with pytest.raises(UsageError, match="fifo"):
        small.set_eviction("fifo")
    with ChunkStore.open(small.path, read_only=True) as reading:
        assert reading.eviction == "lfu"
        with pytest.raises(UsageError):
            reading.set_eviction("lru")


def test_saved_entries_take_free_room_and_each_others(small: ChunkStore) -> None:
    ingested = [big(small, number) for number in range(4)]
    saved = [big(small, 100 + number, saved=True) for number in range(20)]
    assert set(ingested) <= set(keys(small))
    assert len(keys(small)) > 10
    assert saved[-1] in keys(small)
    assert saved[0] not in keys(small)
    assert small.stats().saved_entries == len(keys(small)) - 4


def test_saved_entries_never_push_out_ingested_ones(small: ChunkStore) -> None:
    filled(small)
    before = keys(small)
    with pytest.raises(StoreFullError, match="one prompt"):
        big(small, 1, saved=True)
    assert keys(small) == before


def test_an_ingest_pushes_out_saved_ones_first(small: ChunkStore) -> None:
    old = [big(small, number) for number in range(3)]
    for number in range(100, 117):
        big(small, number, saved=True)
    for entry in small.entries():
        if entry.saved:  # used later than all others
            read(small, entry.key)
    while small.stats().saved_entries:
        assert set(old) <= set(keys(small))
        old.append(big(small, 200 + len(old)))
    big(small, 300)
    big(small, 301)
    assert old[0] not in keys(small)


@pytest.mark.parametrize("how", ["put", "protect"])
def test_what_an_ingest_covers_is_ingested(small: ChunkStore, how: str) -> None:
    key = big(small, 1, saved=True)
    other = big(small, 2, saved=True)
    if how == "put":
        assert big(small, 1) == key
    else:
        with ChunkStore.open(small.path) as ingest:
            ingest.protect(key)
    assert {entry.key: entry.saved for entry in small.entries()} == {key: False, other: True}
    assert small.find(BIG, [1] * 8, CONTEXT) is not None
    for number in range(100, 117):
        big(small, number, saved=True)
    assert key in keys(small)
    assert other not in keys(small)
    assert small.verify().problems == ()


def test_saving_what_was_ingested_changes_nothing(small: ChunkStore) -> None:
    key = big(small, 1)
    assert big(small, 1, saved=True) == key
    assert [entry.saved for entry in small.entries()] == [False]


def test_the_prefix_that_a_prompt_saved_stays(small: ChunkStore) -> None:
    prefix = small.put(BIG, [7] * 8, (), "", LAYERS, saved=True)
    for number in range(100, 117):
        big(small, number, saved=True)
    assert prefix in keys(small)
    for number in range(18):
        big(small, number)
    assert prefix not in keys(small)  # as any other that is not used


def test_saved_ones_are_found_by_their_chunk_and_discarded(small: ChunkStore) -> None:
    key = big(small, 1, saved=True)
    assert small.keys_of_chunk(chunk_id("1")) == [key]
    assert read(small, key)[1] == LAYERS
    assert small.verify().problems == ()
    assert small.discard(key) > 0
    assert keys(small) == []


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_novel_questions_leave_the_ingested_documents_warm(small: ChunkStore, policy: str) -> None:
    """Prompts with two chunks each that nobody asked for before, in a store that is nearly full."""
    small.set_eviction(policy)
    ingested = [big(small, number) for number in range(11)]
    queries = scaled(40)
    source, hits, looks = random.Random(1), 0, 0
    for query in range(queries):
        for number in source.sample(range(len(ingested)), 3):
            looks += 1
            match = small.find(BIG, [number] * 8, CONTEXT)
            if match is not None:
                hits += 1
                read(small, match.key)
        for novel in range(2):
            big(small, 10_000 + 2 * query + novel, saved=True)
        assert small.used_bytes() <= LIMIT
    assert hits == looks
    assert evictions(small) > queries


def test_pinned_documents_stay_whoever_makes_room(small: ChunkStore) -> None:
    pinned = document(small, "pinned", 1, 2)
    loose = document(small, "loose", 3, 4)
    with ChunkStore.open(small.path) as other:
        assert other.pins.pin(["pinned"]) == 1
        assert other.pins.pin(["pinned"]) == 0
        for number in range(100, 117):
            big(other, number)
    assert set(pinned) <= set(keys(small))
    assert not set(loose) & set(keys(small))
    assert [(d.source, d.pinned) for d in small.catalog.documents()] == [
        ("pinned", True),
        ("loose", False),
    ]
    for number in range(140, 157):
        big(small, number)
    assert set(pinned) <= set(keys(small))
    assert small.stats().pinned_documents == 1
    small.pins.pin(["pinned"], False)
    for number in range(180, 197):
        big(small, number)
    assert not set(pinned) & set(keys(small))


def test_a_chunk_ingested_again_for_a_pinned_document_is_pinned(small: ChunkStore) -> None:
    document(small, "a", 1)
    small.pins.pin(["a"])
    (key,) = document(small, "a", 2)  # it changed
    for number in range(100, 117):
        big(small, number)
    assert key in keys(small)
    assert small.pins.documents() == ["a"]


def test_pins_that_fill_the_store_refuse_and_are_told_before_work(small: ChunkStore) -> None:
    document(small, "pinned", *range(10))
    small.pins.pin(["pinned"])
    with pytest.raises(StoreFullError, match=str(LIMIT)):
        small.require_room(LIMIT // 2)
    with pytest.raises(StoreFullError, match="nothing left to evict"):
        hold_all(small, range(100, 120))
    small.catalog.remove_document("pinned")
    small.require_room(LIMIT // 3)


def test_evictions_are_counted(small: ChunkStore) -> None:
    for number in range(18):
        big(small, number)
    gone = 18 - len(keys(small))
    assert small.counters.read()["eviction"] == gone
    small.close()
    with ChunkStore.open(small.path) as again:
        assert again.counters.read()["eviction.bytes"] == gone * next(again.entries()).nbytes


def test_what_is_used_after_the_order_was_looked_up_stays(small: ChunkStore) -> None:
    stored = filled(small)
    big(small, 1)  # the order of the others is known now
    queue = small._space.eviction._queues[False]
    queue.seconds = 3600.0
    coming = [use.key for use in reversed(queue.uses)]
    read(small, coming[0])
    small.discard(coming[1])
    for number in range(2, 5):
        big(small, number)
    left = keys(small)
    assert coming[0] in left
    assert coming[2] not in left
    assert len(set(stored) & set(left)) > 3
