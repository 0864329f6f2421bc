"""Tensor-parallel ranks select, fall back and save together, as one alone would; without vLLM."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import IntegrityError, NotFoundError, StoreFullError
from cache_store.keys import KVSpec
from engine import precompute
from engine.loaders import LOADER_NAMES
from engine.precompute import ChunkWriter
from engine.ranks import Ranks, Share
from engine.vllm import lockstep
from engine.vllm.lockstep import RankFailed
from engine.vllm.plan import SavePlan
from engine.vllm.worker import BlendRun
from tests.engine.blend_world import World
from tests.engine.vllm.rank_world import Rank, Team, ThreadRanks, make, make_team, plan_for

ORDER = [2, 0, 3, 1]
CASES = [(6, 2, 2), (6, 3, 3), (8, 2, 4)]  # heads, kv heads, ranks: with each kv head on two
POLICIES = [
    "value",
    "key",
    "key+value",
    "attention",
    "question",
    "question:heads=max",
    "question:weight=none",
    "hybrid",
    "first-k",
    "random",
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A world with all its chunks stored, and the number of ranks its model is split over."""
    heads, kv_heads, size = request.param
    world = make(tmp_path_factory.mktemp("ranks"), heads, kv_heads)
    world.ingest()
    return world, size


@pytest.fixture
def pair(tmp_path: Path) -> World:
    """A world for two ranks, whose store is its own."""
    world = make(tmp_path, 6, 2)
    world.ingest()
    return world


def alone(world: World, **options: Any) -> tuple[BlendRun, torch.Tensor]:
    team = make_team(world, 1)
    run = team.blend(plan_for(world, world.prompt(ORDER), **options))[0]
    return run, team.kv()


@pytest.mark.parametrize("rank", range(6))
def test_a_rank_has_the_heads_that_vllm_gives_it(rank: int) -> None:
    assert Share.of(rank, 6, 12) == Share(2 * rank, 2, 1)
    assert Share.of(rank, 6, 6) == Share(rank, 1, 1)
    assert Share.of(rank, 6, 2) == Share(rank // 3, 1, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_select_and_compute_what_one_alone_does(
    split: tuple[World, int], policy: str
) -> None:
    world, size = split
    expected, kv = alone(world, policy=policy)
    team = make_team(world, size)
    runs = team.blend(plan_for(world, world.prompt(ORDER), policy=policy))
    assert expected.blended.selected
    for run in runs:
        assert run.blended.selected == expected.blended.selected
        assert run.blended.per_layer == expected.blended.per_layer
        for mine, theirs in zip(run.blended.scores, expected.blended.scores, strict=True):
            torch.testing.assert_close(mine[2], theirs[2], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(team.kv(), kv, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["value", "attention", "question"])
def test_a_threshold_covers_the_same(split: tuple[World, int], policy: str) -> None:
    world, size = split
    options: dict[str, Any] = dict(policy=policy, threshold="0.6")
    expected, _ = alone(world, **options)
    runs = make_team(world, size).blend(plan_for(world, world.prompt(ORDER), **options))
    assert (
        0 < len(expected.blended.selected) < expected.blended.per_layer[0] or policy == "question"
    )
    assert {run.blended.selected for run in runs} == {expected.blended.selected}


def test_every_selection_of_several_check_layers_is_shared(split: tuple[World, int]) -> None:
    world, size = split
    options = dict(check_layers=(1, 2), ratio=("0.5", "0.2"))
    expected, kv = alone(world, **options)
    team = make_team(world, size)
    runs = team.blend(plan_for(world, world.prompt(ORDER), **options))
    assert len(runs[0].blended.chosen) == 2
    assert {run.blended.chosen for run in runs} == {expected.blended.chosen}
    torch.testing.assert_close(team.kv(), kv, rtol=1e-3, atol=1e-3)


class Wayward(ThreadRanks):
    """The last rank's scores are other ones than rank 0's."""

    def kv_summed(self, x: torch.Tensor) -> torch.Tensor:
        total = super().kv_summed(x)
        return total if self.leads else total.flip(0)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        most = super().largest(x)
        return most if self.leads else most.flip(-1)


@pytest.mark.parametrize("policy", ["value", "question:heads=max"])
def test_a_rank_with_other_scores_follows_rank_0(pair: World, policy: str) -> None:
    expected, kv = alone(pair, policy=policy)
    team = make_team(pair, 2, Wayward)
    runs = team.blend(plan_for(pair, pair.prompt(ORDER), policy=policy))
    scores = [run.blended.scores[-1][2] for run in runs]
    assert not torch.equal(*scores)  # else this proves nothing
    assert [run.blended.selected for run in runs] == [expected.blended.selected] * 2
    torch.testing.assert_close(team.kv(), kv, rtol=1e-3, atol=1e-3)


class Faulty:
    """A rank's store, whose entry of one key can't be read from a layer on; -1: not even opened."""

    def __init__(self, store: Any, key: str, layer: int, error: Exception) -> None:
        self._store, self._key, self._layer, self._error = store, key, layer, error
        self.discarded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_entry(self, key: str) -> Any:
        entry = self._store.open_entry(key)
        if key != self._key:
            return entry
        if self._layer < 0:
            entry.close()
            raise self._error
        return _Reader(entry, self._layer, self._error)

    def discard(self, key: str) -> Any:
        self.discarded.append(key)
        return self._store.discard(key)


class _Reader:
    def __init__(self, entry: Any, layer: int, error: Exception) -> None:
        self._entry, self._layer, self._error = entry, layer, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def layer(self, index: int) -> Any:
        if index >= self._layer:
            raise self._error
        return self._entry.layer(index)


def key_of(world: World, chunk: int) -> str:
    match = world.store.find(world.spec, world.chunks[chunk].token_ids, world.prefix)
    assert match is not None
    return match.key


def spoil(team: Team, chunk: int, layer: int, error: Exception, rank: int = 1) -> list[Faulty]:
    """Lets one rank alone see an entry as broken; gives every rank's store."""
    key = key_of(team.world, chunk)
    stores = []
    for number, one in enumerate(team.ranks):
        store = Faulty(one.worker.store, key if number == rank else "", layer, error)
        one.worker.store = store  # type: ignore[assignment]
        stores.append(store)
    return stores


@pytest.mark.parametrize("loader", LOADER_NAMES)
@pytest.mark.parametrize("layer", [-1, 0, 3])
def test_an_entry_that_one_rank_cannot_read_is_computed_by_all(
    pair: World, loader: str, layer: int
) -> None:
    plan = plan_for(pair, pair.prompt(ORDER), loader=loader, policy="random")
    team = make_team(pair, 2)
    error: Exception = IntegrityError("it is damaged") if layer >= 0 else NotFoundError("gone")
    stores = spoil(team, 3, layer, error)
    runs = team.blend(plan)
    statuses = [[s.status for s in run.sources if s.segment.kind == "chunk"] for run in runs]
    assert statuses == [["exact", "hit", "miss", "hit"]] * 2
    key = key_of_plan(plan, 2)
    gone = [key] if layer >= 0 else []  # one that only isn't there for rank 1 may be for others
    assert [store.discarded for store in stores] == [gone, []]
    assert pair.store.has_entry(key) == (layer < 0)
    pair.store.discard(key)
    expected, kv = alone(pair, policy="random")
    assert runs[0].blended.selected == expected.blended.selected
    torch.testing.assert_close(team.kv(), kv, rtol=1e-3, atol=1e-3)


def key_of_plan(plan: Any, chunk: int) -> str:
    match = [s for s in plan.sources if s.segment.kind == "chunk"][chunk].match
    assert match is not None
    return str(match.key)


def test_what_else_goes_wrong_in_reading_fails_on_all_ranks_and_the_next_blend_works(
    pair: World,
) -> None:
    plan = plan_for(pair, pair.prompt(ORDER))
    team = make_team(pair, 2)
    stores = spoil(team, 0, 2, OSError("the disk is on fire"))
    outcomes = team.all(lambda rank: rank.worker.blend(plan))
    for outcome in outcomes:
        assert isinstance(outcome, RankFailed)
        assert outcome.message == "tensor-parallel rank 1: the disk is on fire"
    assert [store.discarded for store in stores] == [[], []]
    for rank, store in zip(team.ranks, stores, strict=True):
        rank.worker.store = store._store
    expected, _ = alone(pair)
    assert team.blend(plan)[1].blended.selected == expected.blended.selected


def test_a_fault_of_the_request_is_told_by_all_ranks(pair: World) -> None:
    plan = plan_for(pair, pair.prompt(ORDER), policy="explicit", indices=(0,))
    outcomes = make_team(pair, 2).all(lambda rank: rank.worker.blend(plan))
    assert ["position 0 is not a cached token" in str(outcome) for outcome in outcomes] == [
        True
    ] * 2


def test_a_rank_that_falls_out_of_step_ends(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end() -> None:
        raise Ended

    monkeypatch.setattr(lockstep, "PATIENCE", 0.5)
    monkeypatch.setattr(lockstep, "end_process", end)
    team = make_team(pair, 2)

    def broken(*given: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(team.ranks[1].blocks, "write", broken)
    plan = plan_for(pair, pair.prompt(ORDER))
    outcomes = team.all(lambda rank: rank.worker.blend(plan))
    assert isinstance(outcomes[1], Ended)  # and vLLM ends the others
    assert isinstance(outcomes[0], Ended | threading.BrokenBarrierError)


def test_a_rank_whose_others_are_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Ranks):
        size = 2

        def exchanged(self, said: str, seconds: float | None = None) -> tuple[str, ...]:
            raise TimeoutError("connection closed by peer")

    class Ended(BaseException):
        pass

    def end() -> None:
        raise Ended

    monkeypatch.setattr(lockstep, "end_process", end)
    with pytest.raises(Ended):
        lockstep.together(Gone(), lambda: None)  # without a trouble of its own


def test_a_blend_without_trouble_meets_twice(pair: World) -> None:
    team = make_team(pair, 2)
    team.blend(plan_for(pair, pair.prompt(ORDER)))
    assert [rank.ranks.exchanges for rank in team.ranks] == [2, 2]  # type: ignore[attr-defined]


def save(rank: Rank, world: World, chunks: list[int]) -> int:
    given = tuple((world.chunks[i].token_ids, world.chunks[i].chunk_id) for i in chunks)
    return rank.worker.save(SavePlan(world.prefix, given))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_saved_entries_are_whole_and_serve_any_number_of_ranks(
    tmp_path: Path, case: tuple[int, int, int], dtype: Any
) -> None:
    heads, kv_heads, size = case
    worlds = [make(tmp_path / name, heads, kv_heads) for name in ("one", "many")]
    for world in worlds:
        s = world.spec
        world.spec = KVSpec(s.model, s.tokenizer, s.layers, s.kv_heads, s.head_dim, dtype)
    one, many = worlds
    assert make_team(one, 1).all(lambda rank: save(rank, one, [0, 1, 2])) == [3]
    team = make_team(many, size)
    assert team.all(lambda rank: save(rank, many, [0, 1, 2])) == [3] * size
    assert team.all(lambda rank: save(rank, many, [0, 1, 2, 3])) == [1] * size
    assert team.all(lambda rank: save(rank, many, [0, 1, 2, 3])) == [0] * size
    for chunk in (0, 1, 2):
        assert key_of(one, chunk) == key_of(many, chunk)
        entries = []
        for world in worlds:
            with world.store.open_entry(key_of(world, chunk)) as entry:
                tokens = len(world.chunks[chunk].token_ids)
                out = torch.empty(2 * tokens * kv_heads * 8)
                parts = [world.codec.decode(entry.layer(2)[i], i == 1, tokens, out) for i in (0, 1)]
                entries.append(torch.stack(parts))
        torch.testing.assert_close(*entries, rtol=1e-3, atol=1e-3 if dtype == "fp32" else 0.05)
    run = many.prefill(many.prompt(ORDER), ratio="0.3")  # the torch engine's
    again = team.blend(plan_for(many, many.prompt(ORDER)))
    assert [s.status for s in run.found] == [s.status for s in again[0].sources]
    chunks = [s.status for s in run.found if s.segment.kind == "chunk"]
    assert chunks == ["exact", "hit", "hit", "hit"]
    for rank in again:
        assert rank.blended.selected == run.selected


def test_a_prompts_chunks_are_saved_behind_its_prefix_computed_once(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in range(4):
        pair.store.discard(key_of(pair, chunk))
    computed: list[int] = []
    right = precompute.forward

    def forward(model: Any, cache: Any, ids: Any, *given: Any, **named: Any) -> Any:
        computed.append(len(ids))
        return right(model, cache, ids, *given, **named)

    monkeypatch.setattr(precompute, "forward", forward)
    (rank,) = make_team(pair, 1).ranks
    assert [save(rank, pair, [chunk]) for chunk in (0, 1, 2)] == [1, 1, 1]
    assert computed == [len(pair.prefix)]
    rank.worker.blend(plan_for(pair, pair.prompt(ORDER)))
    assert save(rank, pair, [3]) == 1
    assert computed == [len(pair.prefix)] * 2  # what is blended has the room meanwhile
    pair.writer.write_missing(pair.chunks)


def test_a_rank_that_cannot_compute_a_chunk_ends(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the others wait for its heads, and nothing else would end that."""

    class Ended(BaseException):
        pass

    def end() -> None:
        raise Ended

    monkeypatch.setattr(lockstep, "PATIENCE", 0.5)
    monkeypatch.setattr(lockstep, "end_process", end)
    pair.store.discard(key_of(pair, 0))
    team = make_team(pair, 2)
    right = ChunkWriter.compute

    def compute(writer: ChunkWriter, chunks: Any) -> Any:
        if writer.model.ranks.leads:
            return right(writer, chunks)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ChunkWriter, "compute", compute)
    outcomes = team.all(lambda rank: save(rank, pair, [0]))
    assert isinstance(outcomes[1], Ended)
    assert isinstance(outcomes[0], Ended | threading.BrokenBarrierError)


def test_a_full_store_is_told_by_all_ranks(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.store.discard(key_of(pair, 0))
    team = make_team(pair, 2)

    def full(*given: Any, **options: Any) -> str:
        raise StoreFullError("the store is full")

    monkeypatch.setattr(team.ranks[0].worker.store, "put", full)
    outcomes = team.all(lambda rank: save(rank, pair, [0]))
    assert [str(outcome) for outcome in outcomes] == [
        "tensor-parallel rank 0: the store is full"
    ] * 2


def test_rank_0_alone_decides_what_is_missing(pair: World, monkeypatch: pytest.MonkeyPatch) -> None:
    team = make_team(pair, 2)
    pair.store.discard(key_of(pair, 0))
    blind = team.ranks[1].worker.store
    monkeypatch.setattr(blind, "contains", lambda *given, **options: False)
    assert team.all(lambda rank: save(rank, pair, [0, 1])) == [1, 1]


def test_process_groups_join_ranks(tmp_path: Path) -> None:
    where = ["-m", "tests.engine.vllm.group_ranks_child"]
    processes = [
        subprocess.Popen(
            [sys.executable, *where, str(rank), "3", str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [out.splitlines()[-1:] for out, _ in said] == [["done"]] * 3, said
    assert said[1][0].splitlines()[0] == "rank 1 waited in vain for the others"
