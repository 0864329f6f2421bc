"""Many processes at one store, doing everything at random, and a check of what they saw.

In the spirit of diskcache's stress test: each process draws its operations from a seed of its own,
whatever it reads is compared with what must be there, and in the end the whole store is checked.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cache_store.catalog import ChunkText
from cache_store.errors import DamagedEntry, NotFoundError, StoreFullError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, copy, ended, files, in_child, make_layers, scaled
from tests.cache_store.watching import watching

PROCESSES, SECONDS = 8, 5
LIMIT = 9 * 2**20
CHUNKS, CONTEXTS = 40, ((), (1,), (1, 2, 3))
TRACES = {"half-written file", "file that belongs to no entry"}  # what a killed process leaves
LONGEST_STEP = 20.0  # seconds; a store that is busy is given up after as many

Layers = list[tuple[bytes, bytes]]
_MADE: dict[tuple[int, int], Layers] = {}


def tokens_of(number: int) -> list[int]:
    return [number] * (1 + number % 6)


def layers_of(number: int, context: int) -> Layers:
    """The only right content of an entry."""
    if (number, context) not in _MADE:
        seed = 100 * number + context
        _MADE[number, context] = make_layers(BIG, len(tokens_of(number)), seed)
    return _MADE[number, context]


class Actor:
    """One thread of one process; `act` does one thing, and raises where anything is wrong."""

    def __init__(self, store: ChunkStore, seed: int) -> None:
        self.store, self.source = store, random.Random(seed)
        self.seed, self.slowest = seed, 0.0
        self.actions: list[Callable[[], object]] = [
            *[self.ask] * 12,
            *[self.put] * 6,
            *[self.ingest] * 2,
            self.discard,
            self.verify,
            self.change_limit,
            self.pin,
        ]

    def act(self) -> None:
        action = self.source.choice(self.actions)
        began = time.monotonic()
        with contextlib.suppress(StoreFullError):  # all that is there is in use: a refusal
            action()
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.store.counters.add(f"step.{action.__name__}")

    def chunk(self) -> tuple[int, int]:
        return self.source.randrange(CHUNKS), self.source.randrange(len(CONTEXTS))

    def ask(self) -> None:
        """As a prompt: finds several chunks, opens all, reads all, and only then closes."""
        with contextlib.ExitStack() as stack:
            readers = []
            for _ in range(self.source.randrange(1, 6)):
                number, wanted = self.chunk()
                match = self.store.find(BIG, tokens_of(number), CONTEXTS[wanted])
                if match is None:
                    continue
                with contextlib.suppress(NotFoundError, DamagedEntry):  # gone since it was found
                    reader = stack.enter_context(self.store.open_entry(match.key))
                    readers.append((number, CONTEXTS.index(match.context), reader))
            for number, context, reader in readers:
                assert copy(reader) == layers_of(number, context)
        assert self.store.damaged == []

    def put(self) -> str:
        number, context = self.chunk()
        return self.store.put(
            BIG,
            tokens_of(number),
            CONTEXTS[context],
            "",
            layers_of(number, context),
            chunk_id=chunk_id(str(number)),
            saved=self.source.random() < 0.5,
        )

    def ingest(self) -> None:
        """In a store of its own, so that its protection ends: what it stored is there until then,
        once and readable."""
        with ChunkStore.open(self.store.path) as store:
            kept: list[tuple[int, str]] = []
            for number in self.source.sample(range(CHUNKS), 3):
                key = store.put(
                    BIG,
                    tokens_of(number),
                    CONTEXTS[1],
                    "",
                    layers_of(number, 1),
                    chunk_id=chunk_id(str(number)),
                )
                there = store.protected([key])  # it could go until it was protected, not after
                if there and store._space.lease.add((key,)):  # false where there is no room for it
                    kept.append((number, key))
            texts = [ChunkText(chunk_id(str(n)), str(n), 0, 1, 1) for n, _ in kept]
            store.catalog.replace_document(f"{self.seed}", "d", "{}", texts)
            for number, key in kept:
                with store.open_entry(key) as reader:
                    assert copy(reader) == layers_of(number, 1)

    def discard(self) -> None:
        number, context = self.chunk()
        match = self.store.find(BIG, tokens_of(number), CONTEXTS[context])
        if match is not None:
            self.store.discard(match.key)
            self.store._passed_over.clear()

    def verify(self) -> None:
        report = self.store.verify(repair=self.source.random() < 0.5)
        assert {problem.what for problem in report.problems} <= TRACES

    def change_limit(self) -> None:
        self.store.set_limit(self.source.choice((LIMIT, LIMIT * 3 // 4)))
        self.store.set_eviction(self.source.choice(("lru", "lfu")))

    def pin(self) -> None:
        self.store.pins.pin([f"{self.seed}"], self.source.random() < 0.3)


def live(root: Path, seed: int, until: float) -> None:
    """A process of two threads."""
    failed: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            actor = Actor(store, 10 * seed + number)
            while time.monotonic() < until and not failed:
                actor.act()
            assert actor.slowest < LONGEST_STEP
        except BaseException as error:
            failed.append(error)

    with ChunkStore.open(root) as store:
        threads = [threading.Thread(target=thread, args=(number,)) for number in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    for error in failed:
        raise error


def test_everything_at_once(tmp_path: Path) -> None:
    root, seconds = tmp_path / "store", scaled(SECONDS)
    ChunkStore.open(root, limit_bytes=LIMIT).close()
    until = time.monotonic() + seconds
    with watching(root) as watched:
        children = [in_child(lambda n=n: live(root, n, until)) for n in range(PROCESSES - 1)]
        killed = in_child(lambda: live(root, PROCESSES, until + 60))
        time.sleep(max(0.0, until - seconds / 2 - time.monotonic()))
        os.kill(killed, signal.SIGKILL)  # what it used is free, what it wrote is whole
        assert ended(killed) == -signal.SIGKILL
        assert [ended(child) for child in children] == [0] * len(children)
    assert watched.most <= LIMIT
    with ChunkStore.open(root) as store:
        store.verify(repair=True)  # the killed one's
        report = store.verify()
        assert report.problems == ()
        entries = list(store.entries())
        assert len(entries) == len({entry.key for entry in entries}) == len(files(store))
        assert len(entries) > 10
        for number in range(CHUNKS):
            for context, before in enumerate(CONTEXTS):
                match = store.find(BIG, tokens_of(number), before)
                if match is not None and match.exact:
                    with store.open_entry(match.key) as reader:
                        assert copy(reader) == layers_of(number, context)
        done = store.counters.read()
        assert min(done[f"step.{name}"] for name in ("ask", "put", "ingest", "discard")) > 0
        assert done["eviction"] > 0
