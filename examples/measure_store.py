"""What finding and reading stored chunks costs, beside what the machine itself needs.

    python examples/measure_store.py [--entries 100000] [--chunks 100] [--mebibytes 256]

Look-up: a store with many small entries is made (the rows go into the index directly, each with a
real file), and some chunks are looked up in it, opened and closed again: the best of ten rounds.
Reading: entries of a usual model's size are read layer by layer, every byte checksummed, from the
page cache, against reading the same files with read() into one buffer, and against adding up their
mapped bytes: best of ten rounds each, in turns.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cache_store.disk import StagedFile
from cache_store.entry import EntryHeader, write_entry
from cache_store.group import Group
from cache_store.keys import KVSpec
from cache_store.store import ChunkStore

TINY = KVSpec("m" * 64, "t" * 64, layers=1, kv_heads=1, head_dim=2, dtype="bf16")
USUAL = KVSpec("m" * 64, "t" * 64, layers=30, kv_heads=3, head_dim=64, dtype="bf16")
CHUNK_TOKENS, CONTEXT, ROUNDS = 512, tuple(range(35)), 10
AT_ONCE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where to make the stores, for a while")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure_lookup(Path(folder) / "many", args.entries, args.chunks)
        measure_reading(Path(folder) / "large", args.mebibytes * 2**20)


def best(
    *ways: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of the fastest round of each way; they take turns."""
    seconds = [float("inf")] * len(ways)
    for _ in range(ROUNDS):
        for number, way in enumerate(ways):
            began = clock()
            way()
            seconds[number] = min(seconds[number], clock() - began)
    return seconds


def token_ids(number: int) -> list[int]:
    return [number % 50_000, number // 50_000, 7]


def make_many(store: ChunkStore, entries: int) -> None:
    """Entries of three tokens, put in place a thousand in one transaction and without waiting for
    the disk."""
    index = store._index
    layers = [(bytes(12), bytes(12))]
    wait, os.fsync = os.fsync, lambda fd: None
    try:
        for start in range(0, entries, AT_ONCE):
            with index.transaction():
                for number in range(start, min(start + AT_ONCE, entries)):
                    header = EntryHeader(TINY, tuple(token_ids(number)), CONTEXT, "", f"{number}")
                    name = index.disk.new_name(header.key)
                    staged = StagedFile(index.path.parent, name, header.file_bytes)
                    write_entry(staged.descriptor, header, layers)
                    index.set_entry(header.key, staged, header.group)
                    index.set_group(header.group, Group.of(header))
                    staged.close()
    finally:
        os.fsync = wait


def measure_lookup(path: Path, entries: int, chunks: int) -> None:
    with ChunkStore.open(path, limit_bytes=10**12) as store:
        make_many(store, entries)
    source = random.Random(0)
    with ChunkStore.open(path) as store:
        rounds = iter([source.sample(range(entries), chunks) for _ in range(5 * ROUNDS)])

        def find() -> None:
            for number in next(rounds):
                assert store.find(TINY, token_ids(number), CONTEXT) is not None

        def find_and_open() -> None:
            for number in next(rounds):
                match = store.find(TINY, token_ids(number), CONTEXT)
                assert match is not None
                store.open_entry(match.key).close()

        found, opened = best(find, find_and_open)
        own = best(find, find_and_open, clock=time.process_time)
        began = time.perf_counter()
        store._space.eviction.suffices(10**9, saved_only=False)
        scan = time.perf_counter() - began
        store.set_limit(store._space._counted(anew=True))  # full: each put evicts
        puts = []
        for number in range(entries, entries + 20):
            began = time.perf_counter()
            store.put(TINY, token_ids(number), CONTEXT, "", [(bytes(12), bytes(12))])
            puts.append(time.perf_counter() - began)
    print(f"{entries:,} entries; {chunks} chunks in the best of {ROUNDS} rounds:")
    print(f"  found, with their headers   {1000 * found:6.1f} ms, {1000 * own[0]:.1f} ms of CPU")
    print(f"  found and opened            {1000 * opened:6.1f} ms, {1000 * own[1]:.1f} ms of CPU")
    print(f"  looking through all of them for what could go {1000 * scan:.0f} ms")
    puts.sort()
    most = 1000 * puts[-1]
    print(f"  storing one in a full store {1000 * puts[10]:.1f} ms (median), {most:.0f} ms at most")


def measure_reading(path: Path, nbytes: int) -> None:
    layer = np.random.default_rng(0).bytes(USUAL.layer_bytes(CHUNK_TOKENS) // 2)
    layers = [(layer, layer)] * USUAL.layers
    size = USUAL.layers * USUAL.layer_bytes(CHUNK_TOKENS)
    with ChunkStore.open(path, limit_bytes=10**12) as store:
        keys = [
            store.put(USUAL, [number] * CHUNK_TOKENS, CONTEXT, "", layers)
            for number in range(max(1, nbytes // size))
        ]
        files = [row.path for key in keys if (row := store._index.entry(key)) is not None]
        buffer = bytearray(2 * size)

        def load() -> None:
            for key in keys:
                with store.open_entry(key) as reader:
                    for layer in range(USUAL.layers):
                        reader.layer(layer)

        def read() -> None:
            for file in files:
                with file.open("rb", buffering=0) as source:
                    while source.readinto(buffer):
                        pass

        def add_up() -> None:
            for file in files:
                np.memmap(file, np.uint64, "r", shape=file.stat().st_size // 8).sum()

        loaded, sequential, mapped = best(load, read, add_up)
    total = len(keys) * size
    print(
        f"{len(keys)} entries of {size / 1e6:.1f} MB from the page cache, best of {ROUNDS} rounds:"
    )
    for name, seconds in (
        ("read() into a buffer", sequential),
        ("mapped, added up", mapped),
        ("the store: layers, with checksums", loaded),
    ):
        print(f"  {name:34} {total / seconds / 1e9:5.2f} GB/s")
    print(f"  its share: {sequential / loaded:.2f} of read(), {mapped / loaded:.2f} of adding up")


if __name__ == "__main__":
    main()
