"""Transfer: what tokens that are not recomputed must be, against a slow account of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.options import BlendOptions
from tests.engine.blend_world import World, make_world
from tests.engine.policy_world import kv_of, recomputed, stored_kv
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
KINDS = [
    "llama",
    "llama-mha-bias",
    "llama-yarn",  # cos and sin are scaled
    "llama-yarn-mscale",
    "phi3-partial-window",  # half of each head turns
    "phi3-longrope-long",
    "smollm3-window",  # layers without RoPE
    "gemma3",  # two RoPEs
    "qwen3-bias",
]
SIZES = (130, 21, 70, 25)  # chunks of several blocks, the last of them odd, and of one


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(BY_NAME["llama"], tmp_path, sizes=SIZES)
    made.ingest()
    return made


def assert_as(run: Any, expected: Any, atol: float = 2e-4) -> None:
    for layer, (k, v) in enumerate(zip(expected.k, expected.v, strict=True)):
        found = kv_of(run, layer)
        torch.testing.assert_close(found[0], k, rtol=1e-4, atol=atol)
        torch.testing.assert_close(found[1], v, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", KINDS)
def test_neighbours_are_moved_at_every_layer(name: str, tmp_path: Path) -> None:
    """One miss among the chunks, an exact one, one of which nothing is recomputed."""
    world = make_world(BY_NAME[name], tmp_path, sizes=SIZES)
    world.ingest([0, 1, 3])
    prompt = world.prompt((1, 0, 2, 3))
    kv = stored_kv(world, prompt)
    long = kv.chunks[-2]
    assert len(long) == 130
    chosen = [p for p in long if p % 11 in (0, 3) and p < long.stop - 70]  # none in two blocks
    options: dict[str, Any] = dict(indices=chosen)
    run = world.prefill(prompt, **options, transfer=True)
    with torch.inference_mode():
        assert_as(run, recomputed(world, prompt, [chosen] * 4, moved=True))
        still = world.prefill(prompt, **options, transfer=False)
        assert_as(still, recomputed(world, prompt, [chosen] * 4, moved=False))
    left = [p for p in long if p not in chosen]
    for layer in range(4):
        for a, b in zip(kv_of(run, layer), kv_of(still, layer), strict=True):
            assert torch.equal(a[left], b[left]) == (layer == 0)
            same = [p for p in kv.k if p not in long]
            assert torch.equal(a[same], b[same])


def test_what_is_exact_or_has_nothing_recomputed_stays_bit_for_bit(world: World) -> None:
    prompt = world.prompt((1, 0, 2, 3))
    reuse = world.prefill(prompt, ratio=0)
    kv = stored_kv(world, prompt)
    first, second, third = kv.chunks
    chosen = [*range(second.start, second.stop, 5)]
    run = world.prefill(prompt, indices=chosen, transfer=True)
    same = [*kv.exact, *first, *third]
    for layer in range(4):
        for a, b in zip(kv_of(run, layer), kv_of(reuse, layer), strict=True):
            assert torch.equal(a[same], b[same])
            left = [p for p in second if p not in chosen]
            assert torch.equal(a[left], b[left]) == (layer == 0)


@pytest.mark.parametrize("policy", ["question", "value", "attention", "hybrid", "first-k"])
def test_gradual_filtering_moves_by_those_that_are_left(world: World, policy: str) -> None:
    prompt = world.prompt((1, 0, 2, 3))
    hits = stored_kv(world, prompt).hits
    options: dict[str, Any] = dict(policy=policy, transfer=True)
    at, until = ((1, 2), 1) if policy in ("value", "attention", "hybrid") else ((1, 2), -1)
    wide = list(world.prefill(prompt, ratio="0.4", check_layers=1, **options).selected)
    run = world.prefill(prompt, ratio=("0.4", "0.1"), check_layers=at, **options)
    few = list(run.selected)
    assert set(few) < set(wide)
    layers = [hits, hits, wide, few] if until == 1 else [wide, wide, wide, few]
    assert run.per_layer == tuple(map(len, layers))
    with torch.inference_mode():
        assert_as(run, recomputed(world, prompt, layers, moved=True, full_until=until))


@pytest.mark.parametrize("policy", ["question", "value", "attention", "hybrid", "random"])
def test_gradual_filtering_down_to_none(world: World, policy: str) -> None:
    """From where nothing is recomputed on, nothing is moved."""
    prompt = world.prompt((1, 0, 2, 3))
    run = world.prefill(
        prompt, policy=policy, transfer=True, ratio=("0.3", "0"), check_layers=(1, 2)
    )
    assert run.selected == ()
    assert run.per_layer[2:] == (74, 0)
    stored = stored_kv(world, prompt)
    _, v = kv_of(run, 3)
    for p in stored.hits:
        assert torch.equal(v[p], stored.v[p][3])


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3"])
def test_ratio_0_and_1_are_exact_with_transfer(name: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    full = world.full(prompt)
    reuse = world.prefill(prompt, mode="reuse")
    for policy in ("question", "value", "hybrid", "random"):
        options: dict[str, Any] = dict(policy=policy, transfer=True)
        none = world.prefill(prompt, ratio=0, **options)
        assert torch.equal(none.logits, reuse.logits)
        for a, b in zip(world.kv(none), world.kv(reuse), strict=True):
            assert torch.equal(a, b)
        for ratio in ("1", "0.999999999"):
            every = world.prefill(prompt, ratio=ratio, **options)
            torch.testing.assert_close(every.logits[0], full, rtol=0, atol=1e-4)


def test_which_policies_transfer_unless_told() -> None:
    assert BlendOptions.of().transfers
    assert BlendOptions.of(policy="hybrid").transfers
    assert not BlendOptions.of(policy="value").transfers
    assert BlendOptions.of(policy="value", transfer=True).transfers
    assert not BlendOptions.of(transfer=False).transfers
    assert not BlendOptions.of(mode="reuse", transfer=True).transfers
