"""Answers from KV that is stored in another type than it is computed in."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine, SamplingOptions
from engine.codec import KV_DTYPES
from engine.compare import divergence
from engine.loaders import LOADER_NAMES
from engine.policies import POLICY_NAMES
from tests.engine.blend_world import World, make_world
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
ORDER = (3, 1, 0, 2)
# KL, in nats, from answers over KV that is stored as it is computed, for these random weights.
ADDED = {"fp8": 1e-2, "int8": 1e-4, "int4": 2e-2, "bf16": 1e-4, "fp16": 1e-5, "fp32": 0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world(BY_NAME["llama"], tmp_path_factory.mktemp("world"))
    made.ingest()
    return made


def stored(world: World, dtype: str) -> World:
    """The same, with its KV in this type beside the other."""
    other = replace(world, spec=replace(world.spec, dtype=dtype))
    other.ingest()
    return other


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_answers_stay_where_they_were(plain: World, dtype: str) -> None:
    world, prompt = stored(plain, dtype), plain.prompt(ORDER)
    cached = [p for s in prompt.segments if s.kind == "chunk" for p in range(s.start, s.end)]
    for indices in ((), cached[40::6]):
        runs = [w.prefill(prompt, indices=indices) for w in (plain, world)]
        assert float(divergence(runs[0].logits, runs[1].logits)) <= ADDED[dtype]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_everything_recomputed_is_a_full_prefill(plain: World, dtype: str) -> None:
    world, prompt = stored(plain, dtype), plain.prompt(ORDER)
    assert (world.prefill(prompt, ratio=1).logits[0] - world.full(prompt)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_exact_up_to_quantisation(plain: World, dtype: str) -> None:
    """One chunk behind its own prefix is exact, and nothing of it is recomputed."""
    world, prompt = stored(plain, dtype), plain.prompt((0,))
    run = world.prefill(prompt, ratio=0.5)
    assert [s.status for s in run.used if s.segment.kind == "chunk"] == ["exact"]
    assert not run.selected
    assert float(divergence(world.full(prompt)[None], run.logits)) <= ADDED[dtype]


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "explicit"])
def test_every_policy_recomputes_as_many(plain: World, name: str) -> None:
    world, prompt = stored(plain, "int8"), plain.prompt(ORDER)
    runs = [w.prefill(prompt, policy=name, ratio=0.3) for w in (plain, world)]
    assert len(runs[1].selected) == len(runs[0].selected) > 0
    same = set(runs[0].selected) & set(runs[1].selected)
    assert len(same) >= 0.9 * len(runs[0].selected)


def test_every_loader_gives_the_same_bits(plain: World) -> None:
    world, prompt = stored(plain, "int4"), plain.prompt(ORDER)
    runs = [world.prefill(prompt, ratio=0.2, loader=name) for name in LOADER_NAMES]
    for run in runs[1:]:
        assert torch.equal(run.logits, runs[0].logits)
        for ours, theirs in zip(world.kv(run), world.kv(runs[0]), strict=True):
            assert torch.equal(ours, theirs)
        assert run.bytes_loaded == runs[0].bytes_loaded


def test_the_same_work_gives_the_same_files(plain: World, tmp_path: Path) -> None:
    world = stored(plain, "int8")
    keys = [e.key for e in world.store.entries() if e.spec == world.spec]
    before = {key: world.store.open_entry(key).path.read_bytes() for key in keys}
    for key in keys:
        world.store.discard(key)
    world.ingest()
    for key in keys:
        assert world.store.open_entry(key).path.read_bytes() == before[key]


def test_types_live_side_by_side(plain: World) -> None:
    """Another type's entries are never taken for one's own."""
    world, prompt = replace(plain, spec=replace(plain.spec, tokenizer="x")), plain.prompt(ORDER)
    for dtype in ("int8", "fp32"):
        only = replace(world, spec=replace(world.spec, dtype=dtype))
        run = only.prefill(prompt, mode="reuse")
        assert run.bytes_loaded == 0
        if dtype == "int8":
            only.ingest()
            assert only.prefill(prompt, mode="reuse").bytes_loaded > 0


@pytest.mark.model
def test_the_default_model_answers_over_int8(default_model_dir: Path, tmp_path: Path) -> None:
    texts = ["The pilot boat of Greywater leaves at six. " * 8, "Orla keeps the log. " * 8]
    with ChunkStore.open(tmp_path / "store", limit_bytes=10**9) as store:
        engine = Engine.load(default_model_dir, dtype="bf16", kv_dtype="int8", store=store)
        chunks = [engine.chunk(text) for text in texts]
        assert engine.precompute(chunks) == 2
        sizes = [entry.nbytes / entry.tokens for entry in store.entries()]
        assert max(sizes) <= 0.7 * 23_040  # short ones, whose headers count
        blend = BlendOptions.of(ratio="0.16", min_tokens=0)
        sampling = SamplingOptions(max_tokens=3)
        result = engine.ask("When?", chunks, blend=blend, sampling=sampling, compare=True)
    assert (result.model.dtype, result.model.kv_dtype) == ("bf16", "int8")
    assert [s.status for s in result.prompt.segments if s.kind == "chunk"] == ["exact", "hit"]
    assert result.compare is not None
    assert result.compare.kl_mean < 0.3
