"""Ingest on several devices: one store, nothing twice, nothing lost with a worker."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache_store.errors import CacheblendError, StoreFullError, UsageError
from cache_store.place import MIN_LIMIT
from cache_store.store import ChunkStore
from engine import ingest_workers
from engine.blueprint import Blueprint
from engine.ingest_workers import DeviceWriters, Stored, Task, WorkerModel, writer_on
from engine.model import Decoder
from engine.precompute import ChunkWriter, OnStored
from engine.prompt import PromptChunk
from tests.engine.blend_world import ids
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.timeout(120)

CHUNKS = [PromptChunk(ids(400 + n, 10 + n), f"{n:064x}") for n in range(16)]
DEADLY = CHUNKS[4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), folder)
    return Blueprint.open(write_tokenizer(folder), device="cpu", dtype="fp32")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", limit_bytes=10**9) as opened:
        yield opened


def make_writers(model: Blueprint, store: ChunkStore) -> DeviceWriters:
    tokens = sum(len(chunk.token_ids) for chunk in CHUNKS)
    return DeviceWriters(["cpu", "cpu"], model, store, tokens=tokens, protected=(), threads=1)


def noting(told: dict[str, str]) -> OnStored:
    """Keeps keys by chunk id; none may be told of twice."""

    def stored(chunk: PromptChunk, key: str) -> None:
        assert chunk.chunk_id not in told
        told[chunk.chunk_id or ""] = key

    return stored


def test_what_two_workers_store_is_what_one_process_stores(
    model: Blueprint, store: ChunkStore, tmp_path: Path
) -> None:
    writers = make_writers(model, store)
    told: dict[str, str] = {}
    writers.write_all(CHUNKS, noting(told))
    assert multiprocessing.active_children() == []
    assert set(told) == {chunk.chunk_id for chunk in CHUNKS}
    assert store.verify().problems == ()
    with ChunkStore.open(tmp_path / "alone", limit_bytes=10**9) as other:
        decoder = Decoder.load(model.path, "cpu", "fp32")
        alone = ChunkWriter(decoder, other, model.spec, model.template.prefix)
        assert alone.write_prefix() == writers.write_prefix()
        alone.write_missing(CHUNKS)
        assert {e.key for e in other.entries()} == {e.key for e in store.entries()}
        assert {e.key for e in store.entries()} == {*told.values(), writers.write_prefix()}
        for chunk in CHUNKS:
            assert alone.held(chunk.token_ids) == writers.held(chunk.token_ids)
            assert store.keys_of_chunk(chunk.chunk_id or "") == [told[chunk.chunk_id or ""]]


@contextmanager
def dying_on(model: WorkerModel, device: str) -> Iterator[Callable[[Task], Stored]]:
    """A worker that is killed once it has stored one certain chunk, as often as a file says."""
    deaths = model.store.parent / "deaths"
    with writer_on(model, device) as work:

        def perhaps(task: Task) -> Stored:
            result = work(task)
            left = int(deaths.read_text())
            if DEADLY in task.chunks and left:
                deaths.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        yield perhaps


def test_the_work_of_a_dead_worker_is_done_by_another(
    model: Blueprint, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_workers, "writer_on", dying_on)
    deaths = store.path.parent / "deaths"
    deaths.write_text("1")
    told: dict[str, str] = {}
    make_writers(model, store).write_all(CHUNKS, noting(told))
    assert deaths.read_text() == "0"
    assert set(told) == {chunk.chunk_id for chunk in CHUNKS}
    assert store.verify().problems == ()


def test_work_that_kills_twice_is_an_error_and_the_rest_is_kept(
    model: Blueprint, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_workers, "writer_on", dying_on)
    (store.path.parent / "deaths").write_text("2")
    writers = make_writers(model, store)
    told: dict[str, str] = {}
    with pytest.raises(CacheblendError, match="chunks could not be computed: 2 workers died") as e:
        writers.write_all(CHUNKS, noting(told))
    assert "run the same command again" in e.value.hint
    assert multiprocessing.active_children() == []
    for chunk in CHUNKS:  # what is in the store was told of, and nothing else
        assert told.get(chunk.chunk_id or "") == writers.held(chunk.token_ids)
    assert told.get(DEADLY.chunk_id or "")
    writers.write_all([c for c in CHUNKS if c.chunk_id not in told], noting(told))
    assert set(told) == {chunk.chunk_id for chunk in CHUNKS}


def test_a_full_store_is_the_same_error_as_in_one_process(
    model: Blueprint, store: ChunkStore
) -> None:
    store.set_limit(MIN_LIMIT)
    many = [PromptChunk(ids(400, 300 + n), f"{n:064x}") for n in range(40)]  # twice as much
    told: dict[str, str] = {}
    with pytest.raises(StoreFullError, match="is full"):
        make_writers(model, store).write_all(many, noting(told))
    assert told
    assert store.verify().problems == ()


def test_an_interrupt_ends_the_workers_and_keeps_what_is_stored(
    model: Blueprint, store: ChunkStore
) -> None:
    writers = make_writers(model, store)
    told: list[str] = []

    def stored(chunk: PromptChunk, key: str) -> None:
        told.append(key)
        if len(told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writers.write_all(CHUNKS, stored)
    assert multiprocessing.active_children() == []
    assert store.verify().problems == ()
    assert set(told) <= {entry.key for entry in store.entries()}


def test_a_worker_that_cannot_start_says_why(model: Blueprint, store: ChunkStore) -> None:
    writers = DeviceWriters(["cpu", "cuda:77"], model, store, tokens=10, protected=())
    with pytest.raises(UsageError, match="cuda:77"):
        writers.write_all(CHUNKS, lambda chunk, key: None)
    assert multiprocessing.active_children() == []


def test_no_worker_evicts_what_others_stored(model: Blueprint, tmp_path: Path) -> None:
    """Entries of the same ingest are safe even where they were used longer ago than all others."""
    probe = ChunkStore.open(tmp_path / "probe", limit_bytes=10**9)
    size = probe.predicted_bytes(model.spec, 400, len(model.template.prefix))
    probe.close()
    with ChunkStore.open(tmp_path / "store", limit_bytes=30 * size) as store:
        decoder = Decoder.load(model.path, "cpu", "fp32")
        writer = ChunkWriter(decoder, store, model.spec, model.template.prefix)
        mine = [writer.write(chunk.token_ids) for chunk in CHUNKS[:4]]
        strangers = [writer.write(ids(400, 900 + n)) for n in range(16)]
        tokens = sum(len(chunk.token_ids) for chunk in CHUNKS[4:])
        writers = DeviceWriters(["cpu", "cpu"], model, store, tokens=tokens, protected=mine)
        writers.write_all(CHUNKS[4:], lambda chunk, key: None)
        there = {entry.key for entry in store.entries()}
        assert set(mine) <= there
        assert all(writers.held(chunk.token_ids) for chunk in CHUNKS)
        assert not set(strangers) <= there  # there was too little room for all
