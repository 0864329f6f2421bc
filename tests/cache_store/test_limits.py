"""The limit counts every byte on disk, is never exceeded, and costs whole entries, oldest first."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_store.catalog import ChunkText
from cache_store.errors import StoreFullError, UsageError
from cache_store.keys import chunk_id
from cache_store.space import disk_usage
from cache_store.store import ChunkStore
from cache_store.tiers.uploads import Uploads
from tests.cache_store.support import BIG, CONTEXT, du, file_of, files, make_layers, put, read

LIMIT = 6 * 2**20
TOKENS = 8  # 256 kB an entry: about a dozen fit


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "small", limit_bytes=LIMIT) as store:
        yield store


def big(store: ChunkStore, number: int, tokens: int = TOKENS, context: tuple[int, ...] = ()) -> str:
    return store.put(BIG, [number] * tokens, context, "", _LAYERS[tokens])


_LAYERS = {tokens: make_layers(BIG, tokens) for tokens in (1, TOKENS, 3 * TOKENS)}


def keys(store: ChunkStore) -> list[str]:
    return [entry.key for entry in store.entries()]


def test_used_is_what_du_counts(store: ChunkStore) -> None:
    for number in range(5):
        big(store, number)
    (store.path / "kv" / "partial" / "left").write_bytes(b"x" * 10_000)
    (store.path / "kv" / ("0" * 64 + ".00000000.kv")).write_bytes(b"x" * 50_000)
    assert store.used_bytes() == du(store.path) == disk_usage(store.path)


def test_the_limit_is_never_exceeded_whatever_is_written(small: ChunkStore) -> None:
    source = random.Random(5)
    most = 0
    for number in range(120):
        big(small, number, source.choice((1, TOKENS, 3 * TOKENS)), (number % 3,))
        if number % 10 == 0:
            text = source.randbytes(20_000).hex()
            chunk = ChunkText(chunk_id(text), text, 0, len(text), 9)
            small.catalog.replace_document(f"{number}", "d", "{}", [chunk])
        for key in source.sample(keys(small), min(2, len(keys(small)))):
            read(small, key)
        small._index.flush()
        most = max(most, small.used_bytes())
        assert small.used_bytes() <= LIMIT
    assert most > LIMIT * 0.7  # and the room is used
    assert du(small.path) <= LIMIT
    assert small.verify().problems == ()


def test_files_nobody_knows_count_too(small: ChunkStore) -> None:
    (small.path / "kv" / "foreign").write_bytes(b"x" * (3 * 2**20))
    for number in range(30):
        big(small, number)
        assert small.used_bytes() <= LIMIT


def test_the_least_recently_used_goes_first_and_whole(small: ChunkStore) -> None:
    stored = [big(small, number) for number in range(10)]
    read(small, stored[0])
    read(small, stored[2])
    while stored[1] in keys(small):
        big(small, 100 + len(keys(small)))
        left = keys(small)
        assert [key in left for key in (stored[0], stored[2])] == [True, True]
        assert len(files(small)) == len(left)  # its file went with it
    assert small.find(BIG, [1] * TOKENS, ()) is None
    assert small._index.group(_group(small, 1)) is None


def _group(store: ChunkStore, number: int) -> str:
    from cache_store.keys import group_key

    return group_key(BIG, [number] * TOKENS)


def test_evicting_one_context_leaves_the_chunks_others(small: ChunkStore) -> None:
    old = big(small, 1, context=(1,))
    new = big(small, 1, context=(2,))
    number = 10
    while old in keys(small):
        read(small, new)
        big(small, number := number + 1)
    match = small.find(BIG, [1] * TOKENS, (1,))
    assert match is not None
    assert (match.key, match.exact) == (new, False)


def test_protected_pinned_and_open_entries_stay(small: ChunkStore) -> None:
    protected, pinned, opened, loose = (big(small, number) for number in range(4))
    small.protect(protected)
    with small.pinned([pinned]), small.open_entry(opened):
        for number in range(10, 40):
            big(small, number)
        assert {protected, pinned, opened} <= set(keys(small))
        assert loose not in keys(small)
    for number in range(50, 80):
        big(small, number)
    assert protected in keys(small)
    assert not {pinned, opened} & set(keys(small))


def test_a_reader_that_is_dropped_lets_its_entry_go(small: ChunkStore) -> None:
    key = big(small, 0)
    small.open_entry(key)
    for number in range(1, 30):
        big(small, number)
    assert key not in keys(small)


def test_what_cannot_fit_is_refused_and_costs_nothing(small: ChunkStore) -> None:
    stored = [big(small, number) for number in range(5)]
    layers = make_layers(BIG, 400)
    with pytest.raises(StoreFullError) as caught:
        small.put(BIG, [1] * 400, (), "", layers)
    assert str(LIMIT) in caught.value.message
    assert "store limit" in caught.value.hint
    assert keys(small) == stored
    for key in stored:
        small.protect(key)

    def fill() -> None:
        for number in range(10, 40):
            small.protect(big(small, number))

    with pytest.raises(StoreFullError):
        fill()
    assert set(stored) <= set(keys(small))
    assert small.used_bytes() <= LIMIT


def test_the_limit_a_refusal_names_is_enough(small: ChunkStore) -> None:
    layers = make_layers(BIG, 400)
    with pytest.raises(StoreFullError) as caught:
        small.put(BIG, [1] * 400, (), "", layers)
    small.set_limit(int(caught.value.hint.split()[-1]))
    small.put(BIG, [1] * 400, (), "", layers)
    assert small.used_bytes() <= small.limit


def test_prediction_holds(store: ChunkStore) -> None:
    """Twenty entries take what was predicted, to a hundredth, and never more."""
    before = store.used_bytes()
    predicted = 0
    for number in range(20):
        predicted += store.predicted_bytes(BIG, TOKENS, len(CONTEXT))
        store.put(BIG, [number] * TOKENS, CONTEXT, "", _LAYERS[TOKENS], chunk_id="c" * 64)
    assert sum(entry.nbytes for entry in store.entries()) <= predicted
    wal = store.path / "kv" / "cache.db-wal"
    grown = store.used_bytes() - before - wal.stat().st_blocks * 512
    assert predicted * 0.98 <= grown <= predicted


def test_room_is_asked_for_before_the_work(small: ChunkStore) -> None:
    nbytes = small.predicted_bytes(BIG, TOKENS)
    small.require_room(5 * nbytes)
    with pytest.raises(StoreFullError, match=str(LIMIT)) as caught:
        small.require_room(100 * nbytes)
    needed = int(caught.value.hint.split()[-1])
    small.set_limit(needed)
    small.require_room(100 * nbytes)
    for number in range(100):
        small.protect(big(small, number))
    assert small.used_bytes() <= needed
    held = keys(small)
    small.require_room(0, keep=held)
    with pytest.raises(StoreFullError):
        small.require_room(10 * nbytes, keep=held)
    small.require_room(10 * nbytes)  # by evicting


def test_a_smaller_limit_evicts_and_one_too_small_is_refused(small: ChunkStore) -> None:
    for number in range(10):
        big(small, number)
    newest = keys(small)[-1]
    small.set_limit(4 * 2**20)
    assert small.used_bytes() <= 4 * 2**20
    assert newest in keys(small)
    with pytest.raises(UsageError, match="too small"):
        small.set_limit(1000)
    assert small.limit == 4 * 2**20


def test_a_limit_below_what_is_in_use_is_refused(small: ChunkStore) -> None:
    for number in range(13):
        small.protect(big(small, number))
    with pytest.raises(StoreFullError):
        small.set_limit(4 * 2**20)
    assert small.limit == LIMIT
    assert len(keys(small)) == 13


def test_the_limit_is_everybodys(small: ChunkStore) -> None:
    with ChunkStore.open(small.path, limit_bytes=2**30) as other:
        assert other.limit == LIMIT
        other.set_limit(2 * LIMIT)
        assert small.limit == 2 * LIMIT


def test_another_processs_entries_count_at_once(small: ChunkStore) -> None:
    with ChunkStore.open(small.path) as other:
        for number in range(30):
            big(small if number % 2 else other, number)
            assert small.used_bytes() <= LIMIT


def test_what_killed_writers_left_makes_room(small: ChunkStore) -> None:
    for number in range(3):
        name = f"{number}" * 64 + ".00000000.kv"
        (small.path / "kv" / "partial" / name).write_bytes(b"x" * 2**20)
        (small.path / "kv" / name).write_bytes(b"x" * 2**20)
    stored = [big(small, number) for number in range(8)]
    for key in stored:
        small.protect(key)
    assert keys(small) == stored
    assert small.used_bytes() <= LIMIT
    assert small.verify().problems == ()


def test_the_catalogs_text_takes_its_room_from_entries(small: ChunkStore) -> None:
    for number in range(20):
        big(small, number)
    before = len(keys(small))
    text = "a word and another " * 40_000
    small.catalog.replace_document("book", "d", "{}", [ChunkText(chunk_id(text), text, 0, 1, 1)])
    assert len(keys(small)) < before
    assert small.used_bytes() <= LIMIT
    with pytest.raises(StoreFullError):
        small.catalog.replace_document(
            "library", "d", "{}", [ChunkText(chunk_id(text * 9), text * 9, 0, 1, 1)]
        )
    assert [document.source for document in small.catalog.documents()] == ["book"]
    assert small.used_bytes() <= LIMIT


def test_counting_costs_little_as_the_store_grows(store: ChunkStore) -> None:
    for number in range(150):
        store.put(BIG, [number], (), "", _LAYERS[1])
    scans: dict[float, float] = {}
    started = time.monotonic()
    for number in range(150, 300):
        store.put(BIG, [number], (), "", _LAYERS[1])
        scans[store._space._scanned_at] = store._space._scan_seconds
    spent = time.monotonic() - started
    last = scans.pop(store._space._scanned_at)  # what follows it isn't over yet
    assert sum(scans.values()) < 0.1 * (spent + last)
    assert len(scans) > 1


def test_entries_of_no_tokens_are_entries(store: ChunkStore) -> None:
    key = put(store, (), ())
    assert read(store, key)[1] == make_layers(read(store, key)[0].spec, 0)
    assert file_of(store, key).exists()


def test_files_that_were_missing_count_once_they_are_back(small: ChunkStore) -> None:
    for number in range(10):
        file_of(small, big(small, number)).unlink()
    small._space._counted(anew=True)
    small._space._scan_seconds = 1000.0  # as if counting took long: it isn't done again soon
    for number in range(30):
        big(small, number)
        assert small.used_bytes() <= LIMIT


def test_a_long_list_of_uploads_takes_its_room_from_entries(small: ChunkStore) -> None:
    uploads = Uploads(small.catalog, lambda key: "gone", lambda note: None)
    for number in range(30):
        big(small, number)
    for part in range(3):
        uploads.add(f"{number:032x}{part:032x}" for number in range(5000))
        assert small.used_bytes() <= LIMIT
    small.set_eviction("none")
    before = uploads.pending()
    small._index.set_limit(small._space._counted(anew=True))
    with pytest.raises(StoreFullError):
        uploads.add(f"{number:064x}" for number in range(5000))
    assert uploads.pending() == before == 15_000
