"""Loaders: the same bits from each, no more read than is needed, and nothing left behind."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import DamagedEntry, NotFoundError, UsageError
from engine.loaders import LOADER_NAMES, DamagedSource, make_loader
from engine.loaders.staging import Pinned
from engine.options import BlendOptions
from engine.prefill import Prefiller
from engine.sources import find_sources
from engine.throttle import ThrottledStore
from engine.timing import Stopwatch, Timer
from tests.engine.blend_world import World, make_world
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
BACKGROUND = [name for name in LOADER_NAMES if name != "sync"]
SPACE = {"pipelined": 2, "async": 4, "sync": 4, "prefetch": 4}  # of the tiny models' 4 layers
ORDER = (3, 1, 0, 2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(BY_NAME["llama"], tmp_path)
    made.ingest()
    return made


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("load-kv")] == []


class WatchedStore:
    """A store that tells `on_read` (layer) of every read, and checks how its readers are used."""

    def __init__(self, store: Any, on_read: Callable[[int], None] = lambda layer: None) -> None:
        self._store, self.on_read = store, on_read
        self.reads: list[tuple[str, int]] = []
        self.readers: list[WatchedReader] = []
        self.missing: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_entry(self, key: str) -> "WatchedReader":
        if key in self.missing:
            raise NotFoundError(f"no entry {key}")
        reader = WatchedReader(self, key, self._store.open_entry(key))
        self.readers.append(reader)
        return reader

    def layers_of(self, key: str) -> list[int]:
        return sorted(layer for read, layer in self.reads if read == key)


class WatchedReader:
    tier = "disk"

    def __init__(self, store: WatchedStore, key: str, reader: Any) -> None:
        self.store, self.key, self.reader = store, key, reader
        self.reading = 0
        self.closed = self.closed_while_read = False

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        self.reading += 1
        self.store.reads.append((self.key, index))
        try:
            self.store.on_read(index)
            return self.reader.layer(index)
        finally:
            self.reading -= 1

    def close(self) -> None:
        self.closed_while_read |= self.reading > 0
        self.closed = True
        self.reader.close()


def prefill(world: World, store: Any, **options: Any):
    chosen = BlendOptions.of(**{"min_tokens": 0, "policy": "value", **options})
    return Prefiller(world.model, store, world.spec)(world.prompt(ORDER), chosen, room=8)


def loader_of(world: World, store: Any, name: str, watch: Stopwatch | None = None):
    found = find_sources(world.prompt(ORDER), store, world.spec, "", "blend", strict=False)
    return make_loader(name, world.model, store, found, watch or Stopwatch(), world.codec)


# What is loaded


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": "0.2"},
        {"ratio": ("0.5", "0.2"), "check_layers": (1, 3), "policy": "key"},
        {"ratio": "0.3", "policy": "random"},
        {"ratio": "0.2", "policy": "question"},
        {"ratio": "0.2", "policy": "hybrid"},
        {"ratio": "0.2", "policy": "attention", "transfer": True},
        {"ratio": "0.3", "check_layers": 3},
        {"mode": "reuse"},
        {"mode": "prefix"},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "qwen3", "phi3-longrope-long"])
def test_all_loaders_give_the_same_bits(model: str, options: dict, tmp_path: Path) -> None:
    world = make_world(BY_NAME[model], tmp_path)
    world.ingest([0, 1, 3])  # the last chunk of the order misses
    one = world.prefill(world.prompt(ORDER), loader="sync", **options)
    for name in BACKGROUND:
        other = world.prefill(world.prompt(ORDER), loader=name, **options)
        assert torch.equal(one.logits, other.logits)
        assert all(torch.equal(a, b) for a, b in zip(world.kv(one), world.kv(other), strict=True))
        assert (one.selected, one.per_layer) == (other.selected, other.per_layer)
        assert one.bytes_loaded == other.bytes_loaded
        assert (one.bytes_loaded > 0) == any(s.match for s in one.found)
        assert one.notes == other.notes == ()


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_each_layer_is_read_once_and_only_where_it_is_needed(world: World, name: str) -> None:
    sources = find_sources(world.prompt(ORDER), world.store, world.spec, "", "blend", strict=False)
    exact, hits = (
        [s.match.key for s in sources if s.status == status and s.match is not None]
        for status in ("exact", "hit")
    )
    assert (len(exact), len(hits)) == (2, 3)  # the prefix and the first chunk
    for options, first in [
        ({"ratio": "0.2", "check_layers": 2}, 2),  # every hit token is computed before layer 2
        ({"ratio": "0.2", "check_layers": 2, "policy": "random"}, 0),
        ({"ratio": "0"}, 0),
    ]:
        store = WatchedStore(world.store)
        prefill(world, store, loader=name, **options)
        assert all(store.layers_of(key) == [0, 1, 2, 3] for key in exact)
        assert all(store.layers_of(key) == list(range(first, 4)) for key in hits)
    store = WatchedStore(world.store)
    prefill(world, store, loader=name, mode="prefix")
    assert {key for key, _ in store.reads} == set(exact)


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_layers_are_read_ahead_as_far_as_there_is_space(world: World, name: str) -> None:
    read = [threading.Event() for _ in range(4)]
    threads: set[str] = set()
    released = -1
    furthest = 0

    def on_read(layer: int) -> None:
        nonlocal furthest
        threads.add(threading.current_thread().name)
        furthest = max(furthest, layer - released)
        read[layer].set()

    store = WatchedStore(world.store, on_read)
    with loader_of(world, store, name) as loader:
        loader.start()
        for layer in range(4):
            assert len(loader.layer(layer)) == 5
            # While this one is in use, with nobody asking for it, the last there is space for:
            assert read[min(3, layer + SPACE[name] - 1)].wait(20)
            released = layer
            loader.release()
    assert furthest == SPACE[name]
    assert all(t.startswith("load-kv") for t in threads) == (name != "sync")
    assert all(reader.closed for reader in store.readers)


def test_async_has_several_reads_in_flight(world: World) -> None:
    together = threading.Barrier(4)
    first: set[int] = set()

    def on_read(layer: int) -> None:
        if layer not in first:  # the first segment of each layer
            first.add(layer)
            together.wait(20)  # raises where there are fewer than four

    with loader_of(world, WatchedStore(world.store, on_read), "async") as loader:
        loader.start()
        assert [len(loader.layer(layer)) for layer in range(4)] == [5] * 4


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_nothing_stored_needs_no_thread(world: World, tmp_path: Path, name: str) -> None:
    empty = make_world(BY_NAME["llama"], tmp_path / "empty")
    run = empty.prefill(empty.prompt(ORDER), loader=name)
    assert run.bytes_loaded == 0
    assert torch.allclose(run.logits[0], empty.full(empty.prompt(ORDER)), atol=1e-4)


# What goes wrong


def damage(world: World, chunk: int, layer: int) -> str:
    """Makes a stored chunk fail its check at a layer, and returns its entry's key."""
    match = world.store.find(world.spec, world.chunks[chunk].token_ids, world.prefix)
    assert match is not None
    tokens = len(world.chunks[chunk].token_ids)
    size = world.spec.layer_bytes(tokens)
    with world.store.open_entry(match.key) as entry:
        path, at = entry.path, entry.header.header_bytes + layer * size + 7
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return match.key


@pytest.mark.parametrize("name", LOADER_NAMES)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_damage_is_named_left_out_and_changes_nothing(
    world: World, tmp_path: Path, name: str, layer: int
) -> None:
    other = make_world(BY_NAME["llama"], tmp_path / "other")
    other.ingest([0, 2, 3])
    expected = other.prefill(other.prompt(ORDER), ratio="0.3")
    key = damage(world, 1, layer)
    options = {"ratio": "0.3", "policy": "random"} if layer == 0 else {"ratio": "0.3"}
    if layer == 0:  # policy value computes every token of it there, so it's not even read
        expected = other.prefill(other.prompt(ORDER), **options)
    store = WatchedStore(world.store)
    run = prefill(world, store, loader=name, **options)
    assert torch.equal(run.logits, expected.logits)
    assert [f"damaged in layer {layer}" in note for note in run.notes] == [True]
    assert [s.status for s in run.found if s.segment.kind == "chunk"] == [
        "exact", "miss", "hit", "hit",
    ]  # fmt: skip
    assert not world.store.contains(world.spec, world.chunks[1].token_ids, world.prefix)
    assert not world.store.has_entry(key)  # it isn't left to the next process
    assert key in {reader.key for reader in store.readers}
    assert all(r.closed and not r.closed_while_read for r in store.readers)
    assert len(run.watch.layers) == 4  # those of the run that counts


@pytest.mark.parametrize("name", BACKGROUND)
def test_damage_is_raised_for_the_layer_it_is_in(world: World, name: str) -> None:
    key = damage(world, 1, 2)
    with loader_of(world, world.store, name) as loader:
        loader.start()
        assert len(loader.layer(0)) == len(loader.layer(1)) == 5
        with pytest.raises(DamagedSource) as caught:
            loader.layer(2)
    assert caught.value.key == key
    assert isinstance(caught.value.__cause__, DamagedEntry)


def test_sync_finds_damage_before_anything_is_computed(world: World) -> None:
    damage(world, 1, 2)
    with loader_of(world, world.store, "sync") as loader, pytest.raises(DamagedSource):
        loader.start()


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_an_entry_evicted_meanwhile_gives_the_others_back(world: World, name: str) -> None:
    store = WatchedStore(world.store)
    match = world.store.find(world.spec, world.chunks[0].token_ids, world.prefix)
    assert match is not None
    store.missing.add(match.key)
    with pytest.raises(DamagedSource):
        loader_of(world, store, name)
    assert len(store.readers) == 3  # prefix, chunk 3, chunk 1
    assert all(reader.closed for reader in store.readers)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", BACKGROUND)
def test_a_stop_in_the_middle_ends_the_threads_before_the_files_are_closed(
    world: World, name: str, error: type[BaseException], monkeypatch
) -> None:
    """Each thread is held within a read of a later layer, and let go when the loader closes."""
    closing = threading.Event()
    held: list[int] = []
    all_held = threading.Barrier(2)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *args: Any, **options: Any) -> None:
            closing.set()
            super().shutdown(*args, **options)

    def on_read(layer: int) -> None:
        if layer == 1:
            held.append(layer)
            all_held.wait(20)
            assert closing.wait(20)

    def stop(*args: Any) -> None:
        all_held.wait(20)
        raise error

    monkeypatch.setattr("engine.loaders.background.ThreadPoolExecutor", Pool)
    monkeypatch.setattr(world.model, "attend", stop)
    store = WatchedStore(world.store, on_read)
    with pytest.raises(error):
        prefill(world, store, loader=name, ratio="0")
    assert held == [1]  # of five segments: nothing more was begun
    assert len(store.readers) == 5
    assert all(r.closed and not r.closed_while_read and r.reading == 0 for r in store.readers)


def test_what_fails_in_a_thread_fails_the_prompt(world: World) -> None:
    def on_read(layer: int) -> None:
        if layer == 2:
            raise MemoryError("no memory")

    store = WatchedStore(world.store, on_read)
    for name in LOADER_NAMES:
        with pytest.raises(MemoryError):
            prefill(world, store, loader=name, ratio="0")
    assert all(r.closed and not r.closed_while_read for r in store.readers)


# Times


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_times_of_each_layer(world: World, name: str) -> None:
    """Lower bounds alone: a wait may take longer, never less."""
    slow = ThrottledStore(world.store, 2e7)
    run = prefill(world, slow, loader=name, ratio="0.2")
    seconds = run.bytes_loaded / 2e7
    layers = run.watch.layers
    assert len(layers) == 4
    assert sum(layer.load_s for layer in layers) >= seconds
    assert run.watch.load.seconds >= sum(layer.load_s for layer in layers)
    assert run.watch.stall.seconds >= sum(layer.stall_s for layer in layers)
    assert all(layer.compute_s > 0 for layer in layers)
    assert sum(layer.stall_s + layer.compute_s for layer in layers) <= run.ttft_s
    if name == "sync":
        assert all(layer.stall_s >= layer.load_s for layer in layers)


def test_a_full_prefill_has_no_times_of_layers(world: World) -> None:
    assert world.prefill(world.prompt(ORDER), mode="full").watch.layers == []


def test_timers_add_up_over_threads() -> None:
    timer = Timer()

    def add() -> None:
        for _ in range(20_000):
            timer.add(1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.seconds == 80_000


# A throttled store


def test_throttled_layers_take_their_time_and_share_the_bandwidth(world: World) -> None:
    match = world.store.find(world.spec, world.chunks[0].token_ids, world.prefix)
    assert match is not None
    with world.store.open_entry(match.key) as plain:
        size = sum(part.nbytes for part in plain.layer(0))
        expected = bytes(plain.layer(0)[0])
    slow = ThrottledStore(world.store, size / 0.02)
    readers = [slow.open_entry(match.key) for _ in range(2)]
    began = time.perf_counter()
    assert bytes(readers[0].layer(0)[0]) == expected
    assert time.perf_counter() - began >= 0.02
    with ThreadPoolExecutor(2) as pool:
        began = time.perf_counter()
        list(pool.map(lambda reader: reader.layer(1), readers))
        assert time.perf_counter() - began >= 0.04
    for reader in readers:
        reader.close()


def test_a_throttled_store_is_the_same_store(world: World) -> None:
    slow = ThrottledStore(world.store, 1e9)
    one = world.prefill(world.prompt(ORDER))
    assert torch.equal(prefill(world, slow).logits, one.logits)
    damage(world, 1, 2)
    assert len(prefill(world, slow, ratio="0").notes) == 1
    ids = world.chunks[1].token_ids
    assert not slow.contains(world.spec, ids, world.prefix)
    world.store.damaged.append("a line")
    assert slow.damaged == ["a line"]
    assert slow.read_only is False
    with pytest.raises(ValueError, match="bandwidth"):
        ThrottledStore(world.store, 0)


# Options


def test_unknown_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="'magic' is unknown") as caught:
        BlendOptions.of(loader="magic")
    assert all(name in caught.value.hint for name in LOADER_NAMES)
    assert BlendOptions().loader == BlendOptions.of().loader == "pipelined"


# Pinned buffers and a side stream, on what stands for CUDA


class FakeCuda:
    """Notes what is asked of streams and events, and does every copy at once."""

    def __init__(self) -> None:
        self.log: dict[int, list[str]] = defaultdict(list)  # event -> what happened to it
        cuda, computing = self, threading.main_thread()

        class Stream:
            def __init__(self, device: object) -> None:
                self.waited_for: list[object] = []

            def wait_stream(self, other: object) -> None:
                self.waited_for.append(other)

        class Event:
            def __init__(self) -> None:
                self.number = len(cuda.log)
                cuda.log[self.number] = []

            def record(self, stream: object) -> None:
                cuda.log[self.number].append("record " + cuda.name(stream))

            def wait(self, stream: object) -> None:
                cuda.log[self.number].append("wait " + cuda.name(stream))

            def synchronize(self) -> None:
                assert threading.current_thread() is not computing or cuda.main_may_wait
                cuda.log[self.number].append("synchronize")

        self.Stream, self.Event = Stream, Event
        self.compute = Stream(None)
        self.main_may_wait = False

    def name(self, stream: object) -> str:
        return "compute" if stream is self.compute else "side"

    def current_stream(self, device: object) -> object:
        return self.compute

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


@pytest.mark.parametrize("name", LOADER_NAMES)
def test_pinned_staging_by_events_alone(world: World, name: str, monkeypatch) -> None:
    expected = prefill(world, world.store, ratio="0.2")
    cuda = FakeCuda()
    cuda.main_may_wait = name == "sync"
    made: list[Pinned] = []

    def staging(device: torch.device, dtype: torch.dtype, size: int, room: int) -> Pinned:
        made.append(Pinned(device, dtype, size, room, cuda))
        return made[-1]

    monkeypatch.setattr("engine.loaders.base.make_staging", staging)
    run = prefill(world, world.store, ratio="0.2", loader=name)
    assert torch.equal(run.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(world.kv(run), world.kv(expected), strict=True))
    (used,) = made
    uses = 4 // SPACE[name]
    assert len(used._there) == SPACE[name]
    for buffer in used._host:  # not written before its last copy is done
        assert cuda.log[buffer.free.number] == ["synchronize", "record side"] * 2
    for buffer in used._there:
        # Computed with after it was filled, and filled again after it was computed with.
        assert cuda.log[buffer.filled.number] == ["record side", "wait compute"] * uses
        assert cuda.log[buffer.free.number] == ["wait side", "record compute"] * uses
    assert cuda.compute in used._stream.waited_for
    assert used._stream in cuda.compute.waited_for


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", LOADER_NAMES)
def test_loaders_on_a_cuda_device(world: World, name: str, tmp_path: Path) -> None:
    """The same stored KV, brought to the device through pinned memory."""
    from engine.model import Decoder

    world.model = Decoder.load(tmp_path / "model", "cuda", "fp32")
    run = prefill(world, world.store, ratio="0.2", loader=name)
    again = prefill(world, world.store, ratio="0.2", loader="sync")
    assert torch.equal(run.logits, again.logits)
    found = find_sources(world.prompt(ORDER), world.store, world.spec, "", "blend", strict=False)
    with loader_of(world, world.store, name) as loader:
        loader.start()
        readers = [world.store.open_entry(s.match.key) for s in found if s.match is not None]
        for layer in range(4):
            loaded = loader.layer(layer)
            for part, reader in zip(loaded, readers, strict=True):
                for ours, stored in zip((part.kv.k, part.kv.v), reader.layer(layer), strict=True):
                    assert ours.device.type == "cuda"
                    assert ours.cpu().numpy().tobytes() == bytes(stored)
        for reader in readers:
            reader.close()
