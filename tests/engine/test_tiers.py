"""Answers over a remote are those over the local disk, whatever becomes of the remote."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache_store.store import ChunkStore
from cache_store.tiers import reader as reader_module
from cache_store.tiers.addresses import connect, read_address
from cache_store.tiers.breaker import Breaker
from cache_store.tiers.remote import RemoteTier
from cache_store.tiers.tiered import TieredStore, open_tiered
from engine.loaders import LOADER_NAMES
from engine.prefill import Prefilled
from tests.cache_store.tiers.servers import Proxy, RedisServer, redis_server
from tests.cache_store.tiers.shelf import Hangs, Shelf, fails, machine
from tests.engine.blend_world import World, make_world
from tests.engine.tiny_models import TINY

ORDER = (2, 0, 3, 1)
LLAMA = next(tiny for tiny in TINY if tiny.name == "llama")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model and prompts for it; its store isn't used."""
    made = make_world(LLAMA, tmp_path_factory.mktemp("model"))
    made.store.close()
    return made


@pytest.fixture
def world(model: World, tmp_path: Path, shelf: Shelf) -> Iterator[World]:
    """Machine A: it ingested everything, and the remote has it."""
    with machine(tmp_path / "a", shelf) as store:
        made = replace(model, store=store)
        made.ingest()
        assert store.push() == 0
        shelf.requests.clear()
        yield made


@pytest.fixture
def b(world: World, tmp_path: Path, shelf: Shelf) -> Iterator[World]:
    """Machine B: the same model, and nothing stored."""
    with machine(tmp_path / "b", shelf) as store:
        yield replace(world, store=store)


def ask(world: World, **options: object) -> Prefilled:
    return world.prefill(world.prompt(ORDER), **{"ratio": "0.2", **options})


def same(one: Prefilled, other: Prefilled) -> None:
    assert torch.equal(one.logits, other.logits)
    assert one.selected == other.selected


def without_store(world: World, tmp_path: Path) -> Prefilled:
    with ChunkStore.open(tmp_path / "nothing", limit_bytes=10**8) as empty:
        return ask(replace(world, store=empty))


@pytest.mark.parametrize(
    ("loader", "policy"), [*((name, "value") for name in LOADER_NAMES), ("pipelined", "question")]
)
def test_what_another_machine_computed_is_used(
    world: World, b: World, loader: str, policy: str
) -> None:
    at_a = ask(world, loader=loader, policy=policy)
    at_b = ask(b, loader=loader, policy=policy)
    same(at_a, at_b)
    assert [s.status for s in at_b.found] == [s.status for s in at_a.found]
    assert at_b.notes == ()
    assert at_b.tiers == {"remote": at_a.tiers["disk"]}
    b.store.settle()
    again = ask(b, loader=loader, policy=policy)
    same(at_a, again)
    assert again.tiers == at_a.tiers


def test_precomputing_takes_what_another_machine_has(b: World, shelf: Shelf) -> None:
    assert b.writer.write_missing(b.chunks) == 0
    asked = len(shelf.requests)
    assert set(ask(b).tiers) == {"disk"}  # the prefix, too
    assert len(shelf.requests) == asked


def test_computing_begins_before_all_layers_are_there(
    b: World, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "SPAN_BYTES", 1)
    monkeypatch.setattr(reader_module, "_AHEAD", 0)
    first: list[float] = []
    forward = b.model.norm_in

    def norm_in(layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer == 1:
            first.append(shelf.count("get") / (1 + len(b.chunks)))  # the prefix is one, too
        return forward(layer, x)

    monkeypatch.setattr(b.model, "norm_in", norm_in)
    ask(b, policy="random")
    assert first[0] <= b.spec.layers - 1


@pytest.mark.parametrize(
    ("trouble", "notes"),
    [
        (fails(), "connection lost"),
        (fails("heads"), "connection lost"),
        (fails("get"), "connection lost"),
        (Hangs(), "too slow"),
        (Hangs("get"), "too slow"),
    ],
    ids=["down", "down at headers", "down at layers", "slow", "slow at layers"],
)
def test_a_remote_that_fails_costs_time_and_a_line(
    world: World,
    tmp_path: Path,
    shelf: Shelf,
    trouble: Callable[[str], None],
    notes: str,
) -> None:
    shelf.before = trouble
    expected = without_store(world, tmp_path)
    with (
        machine(tmp_path / "b", shelf, timeout=0.1) as store,
        trouble if isinstance(trouble, Hangs) else contextlib.nullcontext(),
    ):
        result = ask(replace(world, store=store))  # though nothing comes
        same(result, expected)
        assert len(result.notes) == 1
        assert notes in result.notes[0]
        assert {store.reason_for_miss(world.spec, c.token_ids, "") for c in world.chunks} == {
            "remote"
        }
    assert len(shelf.objects) == 5


def test_a_remote_that_lies_in_the_middle_of_an_entry_costs_that_chunk(
    world: World, b: World, shelf: Shelf, tmp_path: Path
) -> None:
    name = max(shelf.objects, key=lambda name: len(shelf.objects[name]))  # the longest chunk's
    data = bytearray(shelf.objects[name])
    data[-5] ^= 1
    shelf.objects[name] = bytes(data)
    result = ask(b)
    statuses = [s.status for s in result.found if s.segment.kind == "chunk"]
    assert sorted(statuses) == ["hit", "hit", "hit", "miss"]
    assert len(result.notes) == 1
    missing = ORDER[statuses.index("miss")]
    with ChunkStore.open(tmp_path / "three", limit_bytes=10**8) as three:
        local = replace(world, store=three)
        local.ingest([index for index in range(4) if index != missing])
        same(result, ask(local))


def test_a_slow_remote_is_waited_for_no_longer_than_computing_takes(
    world: World, tmp_path: Path, shelf: Shelf
) -> None:
    with machine(tmp_path / "b", shelf, timeout=5) as store:
        slow = replace(world, store=store)
        prefiller_seconds: list[float | None] = []
        look_ahead = TieredStore.look_ahead

        def watched(self, spec, chunks, seconds=None):
            prefiller_seconds.append(seconds)
            look_ahead(self, spec, chunks, seconds)

        from engine.options import BlendOptions
        from engine.prefill import Prefiller

        prefiller = Prefiller(slow.model, store, slow.spec)
        options = BlendOptions.of(min_tokens=0, policy="value", ratio="0.2")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TieredStore, "look_ahead", watched)
            prefiller(slow.prompt(ORDER), options)
            prefiller(slow.prompt(ORDER), options)
        assert prefiller_seconds[0] is None
        assert prefiller_seconds[1] is not None
        assert 0 < prefiller_seconds[1] < 20


# A real server.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def on_redis(folder: Path, port: int, timeout: float = 3.0) -> TieredStore:
    address = read_address(f"redis://127.0.0.1:{port}")
    return open_tiered(
        folder,
        remote=lambda: RemoteTier(lambda s: connect(address, s), timeout, breaker=Breaker(9)),
        limit_bytes=10**8,
    )


@pytest.fixture
def a_on_redis(model: World, tmp_path: Path, server: RedisServer) -> World:
    server.command("FLUSHALL")
    with on_redis(tmp_path / "a", server.port) as store:
        made = replace(model, store=store)
        made.ingest()
        assert store.push() == 0
    return made


def test_redis_serves_another_machine(
    a_on_redis: World, tmp_path: Path, server: RedisServer
) -> None:
    with (
        ChunkStore.open(tmp_path / "a", read_only=True) as a,
        on_redis(tmp_path / "b", server.port) as b,
    ):
        at_a, at_b = ask(replace(a_on_redis, store=a)), ask(replace(a_on_redis, store=b))
        same(at_a, at_b)
        assert at_b.tiers == {"remote": at_a.tiers["disk"]}


@pytest.mark.parametrize("how", ["cut in the middle", "paused", "slow"])
def test_redis_in_trouble_changes_no_answer(
    how: str, a_on_redis: World, tmp_path: Path, server: RedisServer
) -> None:
    expected = without_store(a_on_redis, tmp_path)
    with Proxy(server.port) as proxy, on_redis(tmp_path / "b", proxy.port, 0.4) as store:
        b = replace(a_on_redis, store=store)
        whole = sum(e.nbytes for e in ChunkStore.open(tmp_path / "a", read_only=True).entries())
        if how == "slow":
            proxy.delay = 0.3
        elif how == "paused":
            server.pause()
        else:  # in the middle of the layers
            proxy.cut_after = whole // 2
        try:
            began = time.monotonic()
            result = ask(b)
            assert time.monotonic() - began < 30  # of a slow one: it never ends by itself
        finally:
            server.go_on()
            proxy.delay, proxy.cut_after = 0.0, None
        same(result, expected)
        assert len(result.notes) == 1
        later = ask(b)  # the server is back
        assert later.notes == ()
        assert set(later.tiers) <= {"remote", "disk"}
        assert sum(later.tiers.values()) > 0
