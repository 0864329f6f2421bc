"""A process killed at any moment: what it had said was stored is there, and nothing is torn."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from cache_store.catalog import ChunkText
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import BIG, ended, in_child, make_layers, read, scaled

LAYERS = {n: make_layers(BIG, n) for n in range(1, 7)}
TEXTS = [f"text {n}" for n in range(12)]


def chunks(picked: list[int]) -> list[ChunkText]:
    return [ChunkText(chunk_id(TEXTS[n]), TEXTS[n], 0, 6, 2) for n in picked]


def work(root: Path, seed: int, told: int) -> None:
    """Puts, discards and replaces, for ever; says what it does before, and that it was done
    after, in one write each, as a pipe takes them whole."""
    dice = random.Random(seed)
    with ChunkStore.open(root, on_damage="mend") as store:
        os.write(told, b"open\n")
        while True:
            n, ids = dice.randrange(1, 7), dice.randrange(40)
            what = dice.random()
            if what < 0.6:
                key = store.put(BIG, [ids] * n, (n,), "", LAYERS[n])
                os.write(told, f"put {key}\n".encode())
            elif what < 0.75:
                keys = [entry.key for entry in store.entries()]
                if keys:
                    key = dice.choice(keys)
                    os.write(told, f"drop {key}\n".encode())
                    store.discard(key)
            else:
                source = f"doc {dice.randrange(3)}"
                picked = sorted(dice.sample(range(12), 4))
                line = ",".join(map(str, picked))
                os.write(told, f"replace {source[4:]} {line}\n".encode())
                store.catalog.replace_document(source, "d", "{}", chunks(picked))
                os.write(told, f"document {source[4:]} {line}\n".encode())


def test_nothing_that_was_stored_is_lost(tmp_path: Path) -> None:
    root = tmp_path / "store"
    ChunkStore.open(root, limit_bytes=2**28).close()
    stored: set[str] = set()
    documents: dict[str, list[int]] = {}
    kills = scaled(15)
    left_over = 0
    dice = random.Random(5)
    for seed in range(kills):
        told, tell = os.pipe()
        child = in_child(lambda seed=seed, tell=tell: work(root, seed, tell))
        os.close(tell)
        if dice.random() < 0.85:  # else while it opens the store
            os.read(told, len(b"open\n"))
        time.sleep(dice.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        begun: dict[str, list[int]] = {}
        with os.fdopen(told, "r") as lines:
            for line in lines:
                what, name, *rest = line.split() if " " in line else ("open", "")
                if what == "open":
                    continue
                if what == "put":
                    stored.add(name)
                elif what == "drop":
                    stored.discard(name)
                elif what == "replace":
                    begun[name] = [int(n) for n in rest[0].split(",")]
                else:
                    documents[name] = [int(n) for n in rest[0].split(",")]
        with ChunkStore.open(root, read_only=True) as store:
            here = {entry.key for entry in store.entries()}
            assert stored <= here
            for key in here if seed % 10 == 0 else dice.sample(sorted(here), min(3, len(here))):
                header, layers = read(store, key)
                assert layers == LAYERS[len(header.token_ids)]
            assert store.damaged == []
            for name in documents.keys() | begun.keys():
                found = [TEXTS.index(c.text) for c in store.catalog.chunks(f"doc {name}")]
                # The last one it began may be through before it could say so; half of it is not.
                assert found in (documents.get(name, []), begun.get(name))
            stored = here  # what was being stored is there or not
            documents = {
                name: [TEXTS.index(c.text) for c in store.catalog.chunks(f"doc {name}")]
                for name in documents.keys() | begun.keys()
            }
        if seed % 25 == 0 or seed == kills - 1:
            with ChunkStore.open(root) as store:
                report = store.verify()
                assert report.ok == report.checked == len(here)
                # At worst files that belong to nothing, which go when room is needed.
                left_over += len(report.problems)
                assert all("belongs to no entry" in p.what for p in report.problems)
                store.verify(repair=True)
                assert store.verify().problems == ()
                assert {entry.key for entry in store.entries()} == here
    assert len(stored) > 10
    print(f"{kills} kills, {len(stored)} entries, {left_over} files left over")  # noqa: T201 (the figure, with -s)
