"""A process that ends at any moment leaves a store that is as it was before, or as it is after."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import cache_store.store
from cache_store.disk import ChunkDisk, StagedFile
from cache_store.index import Index
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

IDS = (1, 2, 3)


def partial(store: ChunkStore) -> list[Path]:
    return list((store.path / "kv" / "partial").iterdir())


STEPS: list[tuple[object, str]] = [
    (cache_store.store, "write_entry"),
    (StagedFile, "sync"),
    (StagedFile, "publish"),
    (Index, "set_entry"),
    (Index, "set_group"),
    (ChunkDisk, "settle"),
]


@pytest.mark.parametrize(("owner", "name"), STEPS[:-1], ids=[name for _, name in STEPS[:-1]])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_at_any_step_undoes_the_write(
    store: ChunkStore,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    after: bool,
    error: type[BaseException],
) -> None:
    kept = put(store, IDS, (9,))
    before = store.used_bytes()
    original = getattr(owner, name)

    def failing(*args: Any) -> Any:
        if after:
            original(*args)
        raise error("stop here")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(error, match="stop here"):
            put(store, IDS)
    assert not store.contains(SPEC, IDS, CONTEXT)
    assert [path.name.split(".")[0] for path in files(store)] == [kept]
    assert partial(store) == []
    assert store.verify().problems == ()
    assert store.used_bytes() - before < 2**17  # the index's log at most
    assert read(store, put(store, IDS))[1] == make_layers(SPEC, 3)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(owner, name, 1) for owner, name in STEPS] + [(ChunkDisk, "settle", 2)],
    ids=[f"{name}-{call}" for name, call in [(n, 1) for _, n in STEPS] + [("settle", 2)]],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_process_that_dies_at_any_step_leaves_the_old_or_the_new(
    store: ChunkStore,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    call: int,
    after: bool,
) -> None:
    """The call-th time it comes to a step; there are two transactions, to reserve and to store."""
    kept = put(store, IDS, (9,))
    original = getattr(owner, name)
    calls = 0

    def dying(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*args)
        if after:
            original(*args)
        os._exit(9)

    def write() -> None:
        with ChunkStore.open(store.path) as own:
            monkeypatch.setattr(owner, name, dying)
            put(own, IDS)

    store.close()
    assert ended(in_child(write)) == 9
    with ChunkStore.open(store.path) as again:
        assert read(again, kept)[1] == make_layers(SPEC, 3)
        stored = again.contains(SPEC, IDS, CONTEXT)
        assert stored == ((name, call) == ("settle", 2))
        assert again.damaged == []
        report = again.verify(repair=True)
        assert report.ok == report.checked == 1 + stored
        assert len(report.problems) <= 1  # at worst a file that belongs to nothing
        assert again.verify().problems == ()
        assert partial(again) == []
        assert read(again, put(again, IDS))[1] == make_layers(SPEC, 3)


def test_eviction_cut_short_leaves_no_row_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "small"
    layers = make_layers(BIG, 8)
    with ChunkStore.open(root, limit_bytes=6 * 2**20) as store:
        for n in range(14):
            store.put(BIG, [n] * 8, (), "", layers)
    settle = ChunkDisk.settle

    def dying(disk: ChunkDisk, committed: bool, *rest: object) -> None:
        if disk._local.removals:  # the rows are gone, the files not yet
            os._exit(9)
        settle(disk, committed, *rest)

    def write() -> None:
        with ChunkStore.open(root) as own:
            monkeypatch.setattr(ChunkDisk, "settle", dying)
            own.set_limit(4 * 2**20)

    assert ended(in_child(write)) == 9
    with ChunkStore.open(root) as store:
        before = len(files(store))
        report = store.verify(repair=True)
        assert report.ok == report.checked == before - len(report.problems)
        assert len(report.problems) > 0
        assert all("belongs to no entry" in problem.what for problem in report.problems)
        assert store.verify().problems == ()
        assert len(files(store)) == report.checked


def test_killed_again_and_again(tmp_path: Path) -> None:
    root, limit = tmp_path / "store", 6 * 2**20
    layers = {n: make_layers(BIG, n) for n in range(1, 9)}
    ChunkStore.open(root, limit_bytes=limit).close()

    def write(seed: int) -> None:
        source = random.Random(seed)
        with ChunkStore.open(root) as own:
            while True:
                n = source.randrange(1, 9)
                key = own.put(BIG, [source.randrange(9)] * n, (n,), "", layers[n])
                if source.random() < 0.2:
                    own.discard(key)

    for seed in range(12):
        child = in_child(lambda seed=seed: write(seed))
        time.sleep(random.Random(seed).uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        with ChunkStore.open(root) as store:
            assert store.used_bytes() <= limit
            report = store.verify(repair=bool(seed % 2))
            assert report.ok == report.checked
            for entry in store.entries():
                header, stored = read(store, entry.key)
                assert stored == layers[len(header.token_ids)]
            assert store.damaged == []
    with ChunkStore.open(root) as store:
        store.verify(repair=True)
        assert store.verify().problems == ()
        assert store.verify().checked > 0


def test_an_interrupt_that_arrives_during_the_commit_leaves_the_entry(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises it once the commit has gone through: the row is there, so the file must be."""
    transact, set_group = store._index._cache.transact, store._index.set_group
    written: list[bool] = []

    @contextmanager
    def interrupted(*args: Any, **named: Any) -> Iterator[None]:
        with transact(*args, **named):
            yield
        if written:
            raise KeyboardInterrupt

    def noted(*args: Any) -> None:
        set_group(*args)
        written.append(True)

    monkeypatch.setattr(store._index._cache, "transact", interrupted)
    monkeypatch.setattr(store._index, "set_group", noted)
    with pytest.raises(KeyboardInterrupt):
        put(store, IDS)
    monkeypatch.undo()
    match = store.find(SPEC, IDS, CONTEXT)
    assert match is not None
    assert read(store, match.key)[1] == make_layers(SPEC, len(IDS))
    assert store.verify().problems == ()
