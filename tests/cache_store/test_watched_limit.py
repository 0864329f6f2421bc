"""The limit holds at every moment, as another process measures it, whoever writes."""

import contextlib
import random
import time
from pathlib import Path

import pytest

from cache_store.catalog import ChunkText
from cache_store.errors import DamagedEntry, NotFoundError, StoreFullError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, ended, in_child, make_layers, read, scaled
from tests.cache_store.watching import watching

SIZES = (1, 2, 4, 8, 24)
LAYERS = {tokens: make_layers(BIG, tokens) for tokens in SIZES}
CONTEXTS = ((), (1, 2, 3), tuple(range(400)))


def work(root: Path, seed: int, inserts: int) -> None:
    """Puts, reads, texts, notes, leases, pins and removals, as an ingest and many prompts do."""
    source = random.Random(seed)
    with ChunkStore.open(root) as store:
        for number in range(inserts):
            tokens = source.choice(SIZES)
            ids, context = [seed * 10**6 + number] * tokens, source.choice(CONTEXTS)
            saved = source.random() < 0.3
            try:
                key = store.put(
                    BIG, ids, context, "", LAYERS[tokens], chunk_id=f"{number}", saved=saved
                )
            except StoreFullError:
                assert saved
                continue
            if number % 5 == 0:
                for entry in list(store.entries())[:3]:
                    with contextlib.suppress(NotFoundError, DamagedEntry):  # gone since
                        read(store, entry.key)
            if number % 25 == 0:
                text = source.randbytes(20_000).hex()
                chunk = ChunkText(chunk_id(text), text, 0, 1, 1)
                store.catalog.replace_document(f"{number % 75}", "d", "{}", [chunk])
                store.journal.append({"number": number, "text": text[:1000]})
            if number % 40 == 0:
                store.discard(key)
            store.counters.add("look")
            store.counters.flush()


@pytest.mark.parametrize("limit", [5 * 2**20, 8 * 2**20])
@pytest.mark.parametrize("writers", [1, 2])
def test_no_byte_is_over_the_limit_at_any_moment(tmp_path: Path, limit: int, writers: int) -> None:
    root, inserts = tmp_path / "store", scaled(40)
    ChunkStore.open(root, limit_bytes=limit).close()
    with watching(root) as watched:
        children = [in_child(lambda n=n: work(root, n, inserts)) for n in range(1, writers + 1)]
        assert [ended(child) for child in children] == [0] * writers
    assert watched.most <= limit
    assert watched.most > limit * 0.6  # and the room is used
    assert watched.looks > inserts
    with ChunkStore.open(root) as store:
        assert store.verify().problems == ()
        assert store.counters.read()["eviction"] > 0


def test_a_smaller_limit_holds_once_it_is_set(tmp_path: Path) -> None:
    """While others write: what is there beyond it goes before it is set."""
    root, limit = tmp_path / "store", 12 * 2**20
    ChunkStore.open(root, limit_bytes=limit).close()
    children = [in_child(lambda n=n: work(root, n, scaled(60))) for n in (1, 2)]
    with ChunkStore.open(root) as store:
        deadline = time.monotonic() + 20
        while store.used_bytes() < limit * 0.6 and time.monotonic() < deadline:
            time.sleep(0.01)
        for smaller in (9 * 2**20, 6 * 2**20):
            store.set_limit(smaller)
            with watching(root) as watched:
                store.put(BIG, [smaller] * 8, (), "", LAYERS[8])
            assert watched.most <= smaller == store.limit
        assert [ended(child) for child in children] == [0, 0]
        assert store.used_bytes() <= 6 * 2**20
        assert store.verify().problems == ()
