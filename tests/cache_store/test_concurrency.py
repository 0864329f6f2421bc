"""Several processes at one store."""

import random
import time
from pathlib import Path

from cache_store.catalog import ChunkText
from cache_store.errors import DamagedEntry, NotFoundError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import (
    BIG,
    CONTEXT,
    SPEC,
    ended,
    files,
    in_child,
    make_layers,
    put,
    read,
)


def test_the_same_chunk_put_by_several_at_once_is_stored_once(tmp_path: Path) -> None:
    root = tmp_path / "store"

    def write() -> None:
        with ChunkStore.open(root, limit_bytes=2**26) as store:
            for n in range(15):
                key = put(store, (n,))
                assert read(store, key)[1] == make_layers(SPEC, 1)

    children = [in_child(write) for _ in range(3)]  # they make the store, too
    assert [ended(child) for child in children] == [0, 0, 0]
    with ChunkStore.open(root) as store:
        assert len(list(store.entries())) == len(files(store)) == 15
        assert store.verify().problems == ()


def test_many_processes_make_one_store(tmp_path: Path) -> None:
    for n in range(30):
        root, start = tmp_path / str(n), time.monotonic() + 0.03

        def make(root: Path = root, start: float = start) -> None:
            time.sleep(max(0.0, start - time.monotonic()))
            with ChunkStore.open(root, limit_bytes=2**26) as store:
                assert store.catalog.documents() == []

        children = [in_child(make) for _ in range(6)]
        assert [ended(child) for child in children] == [0] * 6


def test_writers_readers_and_evictions_together(tmp_path: Path) -> None:
    root, limit = tmp_path / "store", 6 * 2**20
    layers = {n: make_layers(BIG, n) for n in range(1, 6)}
    ChunkStore.open(root, limit_bytes=limit).close()

    def write(seed: int) -> None:
        source = random.Random(seed)
        with ChunkStore.open(root) as store:
            for step in range(40):
                n = source.randrange(1, 6)
                store.put(BIG, [source.randrange(30)] * n, (n,), "", layers[n])
                assert store.used_bytes() <= limit
                if step % 10 == 0:
                    text = f"{seed} {step}"
                    chunk = ChunkText(chunk_id(text), text, 0, 1, 1)
                    store.catalog.replace_document(text, "d", "{}", [chunk])
                    assert store.verify(repair=seed == 1).problems == ()

    def look(seed: int) -> None:
        source = random.Random(seed)
        found = 0
        with ChunkStore.open(root, read_only=bool(seed % 2)) as store:
            while found < 60:
                n = source.randrange(1, 6)
                match = store.find(BIG, [source.randrange(30)] * n, (n,))
                if match is None:
                    continue
                try:
                    header, stored = read(store, match.key)
                except (NotFoundError, DamagedEntry):  # evicted since: a miss
                    continue
                assert stored == layers[len(header.token_ids)]
                found += 1
            assert store.damaged == []

    children = [in_child(lambda n=n: write(n)) for n in (1, 2)]
    children += [in_child(lambda n=n: look(n)) for n in (3, 4)]
    assert [ended(child) for child in children] == [0] * 4
    with ChunkStore.open(root) as store:
        assert store.verify().problems == ()
        assert len(store.catalog.documents()) == 8


def test_a_store_opened_before_a_fork_works_in_both(store: ChunkStore) -> None:
    put(store, (1,))

    def work() -> None:
        put(store, (2,))
        assert store.contains(SPEC, (1,), CONTEXT)

    child = in_child(work)
    put(store, (3,))
    assert ended(child) == 0
    assert store.contains(SPEC, (2,), CONTEXT)
    assert store.verify().problems == ()
