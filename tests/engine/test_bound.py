"""The operations a prefill needs, against counts made by hand and against real runs."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from engine import bound
from engine.bound import Flops, full_prefill, of_run, predicted, speedup, spread, visible_keys
from engine.config import ModelConfig
from engine.options import BlendOptions
from engine.prompt import Prompt
from tests.engine.blend_world import World, make_world
from tests.engine.tiny_models import TINY

LLAMA, WINDOW = (next(t for t in TINY if t.name == n) for n in ("llama", "mistral-window"))
SMOLLM2: dict[str, Any] = dict(
    vocab=49152, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_dim=64
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(LLAMA, tmp_path_factory.mktemp("bound"))
    world.ingest()
    return world


@pytest.fixture(scope="module")
def default_model(world: World) -> ModelConfig:
    """The default model's shape, without its files."""
    none = (None,) * SMOLLM2["layers"]
    return replace(world.model.config, **SMOLLM2, windows=none, rope_layers=(True,) * 30)


# The tiny shape: 4 layers, hidden 48, MLP 96, 6 query and 2 KV heads of 8, vocabulary 300.
KV = 2 * 48 * (16 + 16)
REST = 2 * 48 * 48 * 2 + 2 * 3 * 48 * 96
HEAD = 2 * 48 * 300
PAIR = 4 * 48  # operations for one query and one key, all heads


def test_full_prefill_is_counted_by_hand(world: World) -> None:
    flops = full_prefill(world.model.config, 5)
    # Three layers with all 5 tokens, the last one with K and V of 5 and the output of 1.
    assert flops.linear == 4 * 5 * KV + (3 * 5 + 1) * REST + HEAD
    assert flops.attention == (3 * (1 + 2 + 3 + 4 + 5) + 5) * PAIR
    assert flops.scoring == 0


def test_a_deviation_policy_is_counted_by_hand(world: World) -> None:
    """Prefix 0-1, cached 2-9 of which 2-3 exact, suffix 10-11; 3 of the 6 hits are selected."""
    flops = predicted(
        world.model.config, prefix=2, cached=8, exact=2, always=2, ratio=Decimal("0.3")
    )
    hits, tail = 6, 2
    linear = 2 * (hits + tail) * KV + 2 * (3 + tail) * KV  # layers 0 and 1, then 2 and 3
    linear += (hits + tail) * REST + 2 * (3 + tail) * REST + REST + HEAD
    keys = sum(p + 1 for p in range(4, 12))  # layer 0
    keys += 2 * sum(p + 1 for p in (5, 7, 9, 10, 11)) + 12  # layers 1 and 2, then the last token
    assert flops == Flops(linear, keys * PAIR, scoring=3 * 16 * hits)


def test_without_deviation_only_the_selected_are_computed(world: World) -> None:
    half = Decimal("0.5")
    flops = predicted(world.model.config, prefix=2, cached=6, always=2, ratio=half, policy="random")
    assert flops.linear == 4 * (3 + 2) * KV + (3 * (3 + 2) + 1) * REST + HEAD
    assert flops.attention == (3 * (4 + 6 + 8 + 9 + 10) + 10) * PAIR


def test_a_window_limits_the_keys() -> None:
    assert visible_keys([0, 3, 9], None) == 1 + 4 + 10
    assert visible_keys([0, 3, 9], 4) == 1 + 4 + 4
    assert visible_keys(range(100), None) == 5050


def test_spread_is_even() -> None:
    assert spread(range(10), 2) == [2, 7]
    assert spread(range(7), 7) == list(range(7))
    assert spread([], 0) == []


def test_a_run_needs_what_it_computed(world: World) -> None:
    """A blend whose tokens are chosen at equal distances needs exactly what was predicted."""
    prompt = world.prompt([2, 0, 3, 1])
    config, prefix, length = world.model.config, len(world.prefix), len(prompt.token_ids)
    separators = [
        p for s in prompt.segments if s.kind == "separator" for p in range(s.start, s.end)
    ]
    full = full_prefill(config, length)
    reuse = world.prefill(prompt, mode="reuse")
    flops = of_run(config, reuse, BlendOptions.of(mode="reuse"))
    always = [*separators, *range(length - len(world.suffix), length)]
    assert flops.linear == (
        4 * len(always) * KV + (3 * len(always) + 1) * REST + HEAD
    )  # what is stored is not computed
    assert flops.attention == (3 * sum(p + 1 for p in always) + length) * PAIR
    cases: list[dict[str, Any]] = [{"mode": "full"}, {"ratio": 1}]
    for options in cases:
        run = world.prefill(prompt, **options)
        assert of_run(config, run, BlendOptions.of(min_tokens=0, **options)) == full
    skipped = world.prefill(prompt, min_tokens=10_000)
    assert skipped.skipped
    assert of_run(config, skipped, BlendOptions.of(min_tokens=10_000)) == full
    first = prompt.segments[1]
    hits = [p for p in range(prefix + len(first.token_ids), length) if p not in always]
    chosen = spread(hits, 20)
    run = world.prefill(prompt, policy="explicit", indices=chosen)
    flops = of_run(config, run, BlendOptions.of(policy="explicit", indices=chosen))
    keys = sum(p + 1 for p in always + chosen)
    assert flops.attention == (3 * keys + length) * PAIR
    assert flops.linear == (
        4 * (len(always) + 20) * KV + (3 * (len(always) + 20) + 1) * REST + HEAD
    )


def without_separators(world: World) -> Prompt:
    return replace(world, separator=()).prompt([2, 0, 3, 1])


@pytest.mark.parametrize(
    ("policy", "ratio"),
    [("value", "0.2"), ("random", "0.4"), ("question", "0.3"), ("attention", "0.2")],
)
def test_prediction_is_near_the_run(world: World, policy: str, ratio: str) -> None:
    prompt = without_separators(world)
    run = world.prefill(prompt, policy=policy, ratio=ratio)
    options = BlendOptions.of(policy=policy, ratio=ratio, min_tokens=0)
    measured = of_run(world.model.config, run, options)
    guess = predicted(
        world.model.config,
        prefix=len(world.prefix),
        cached=run.cached_tokens,
        exact=len(prompt.segments[1].token_ids),
        always=len(world.suffix),
        ratio=Decimal(ratio),
        policy=policy,
    )
    assert guess.linear == measured.linear
    assert guess.scoring == measured.scoring
    assert guess.attention == pytest.approx(measured.attention, rel=0.15)


def test_several_check_layers_narrow_step_by_step(world: World) -> None:
    prompt = without_separators(world)
    options: dict[str, Any] = dict(policy="value", ratio=("0.6", "0.2"), check_layers=(1, 2))
    run = world.prefill(prompt, **options)
    flops = of_run(world.model.config, run, BlendOptions.of(min_tokens=0, **options))
    always, (h, _, some, few) = len(world.suffix), run.per_layer
    assert h > some > few == len(run.selected)
    fresh = [n + always for n in (h, h, some, few)]
    outputs = [*fresh[1:], 1]  # what a layer puts out is what the next one begins with
    assert flops.linear == sum(fresh) * KV + sum(outputs) * REST + HEAD
    assert flops.scoring == 3 * 16 * (h + some)


@pytest.mark.parametrize("policy", ["attention", "question", "value", "hybrid"])
def test_reuse_chooses_and_compares_nothing(world: World, policy: str) -> None:
    prompt = without_separators(world)
    run = world.prefill(prompt, mode="reuse")
    plain = of_run(world.model.config, run, BlendOptions.of(mode="reuse", policy="random"))
    for options in ({"mode": "reuse"}, {"ratio": 0}, {"threshold": 0}):
        if policy == "hybrid" and "threshold" in options:
            continue
        chosen = BlendOptions.of(policy=policy, min_tokens=0, **options)
        run = world.prefill(prompt, policy=policy, **options)
        assert of_run(world.model.config, run, chosen) == plain


def test_the_question_is_counted_where_it_was_asked(world: World) -> None:
    """Also where narrowing leaves no token in the end, or a threshold takes all of them."""
    prompt = without_separators(world)
    config = world.model.config
    always = range(len(prompt.token_ids) - len(world.suffix), len(prompt.token_ids))
    asked = bound.reading(config, bound.policy_of("question"), always)
    for options in (
        {"ratio": ("0.3", "0"), "check_layers": (1, 2)},
        {"threshold": "0.99999999"},
        {"ratio": "0.2"},
    ):
        run = world.prefill(prompt, policy="question", **options)
        counted = of_run(config, run, BlendOptions.of(policy="question", min_tokens=0, **options))
        told = of_run(config, run, BlendOptions.of(policy="random", ratio="0.2", min_tokens=0))
        assert counted.linear - told.linear == asked.linear > 0
        assert counted.attention - told.attention == asked.attention > 0


def test_windows_are_respected(tmp_path: Path) -> None:
    world = make_world(WINDOW, tmp_path)
    world.ingest()
    config = world.model.config
    assert config.windows == (24,) * 4
    length = 60
    keys = sum(min(p + 1, 24) for p in range(length))
    assert full_prefill(config, length).attention == (3 * keys + 24) * PAIR


@pytest.mark.parametrize(
    ("policy", "ratio", "attention", "linear"),
    [
        ("value", "0.16", 4.61, 5.27),
        ("explicit", "0.16", 5.28, 6.10),
        ("explicit", "0.05", 14.9, 18.1),
    ],
)
def test_the_standard_layout(
    default_model: ModelConfig, policy: str, ratio: str, attention: float, linear: float
) -> None:
    """4,096 tokens: 32 prefix, 8 chunks of 505, 24 suffix. All operations counted alike, the
    bound lies between those of attention and of the linear layers."""
    blend = predicted(
        default_model,
        prefix=32,
        cached=4040,
        exact=505,
        always=24,
        ratio=Decimal(ratio),
        policy=policy,
    )
    limit = speedup(full_prefill(default_model, 4096), blend)
    assert limit.attention == pytest.approx(attention, rel=0.005)
    assert limit.linear == pytest.approx(linear, rel=0.005)
    assert limit.attention < limit.overall < limit.linear


def test_nothing_needed_is_no_limit() -> None:
    assert bound.speedup(Flops(1, 1), Flops(1, 0)).attention == float("inf")
