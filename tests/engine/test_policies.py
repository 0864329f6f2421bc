"""Selection policies: scores against slow accounts of their own, thresholds, specs."""

import math
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import UsageError
from engine.blend import blend
from engine.loaders import LOADER_NAMES, make_loader
from engine.options import BlendOptions
from engine.policies import POLICY_NAMES, Candidates, LayerKV, covering, make_policy, select
from engine.prompt import Prompt
from engine.sources import find_sources
from engine.timing import Stopwatch
from tests.engine.blend_world import World, make_world
from tests.engine.policy_world import Slow, kv_of, question_scores, recomputed, stored_kv
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
FAMILIES = [
    "llama",
    "llama-mha-bias",
    "llama-yarn",
    "mistral-window",
    "qwen2-window",
    "qwen3-bias",
    "smollm3-window",
    "phi3-partial-window",
    "gemma3",
    "gemma3-linear-scale",
]
AMOUNTS = ["value", "key", "key+value", "attention", "question"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(BY_NAME["llama"], tmp_path)
    made.ingest()
    return made


def with_a_miss(world: World) -> Prompt:
    """An exact chunk, a hit, a missed one, a hit; each between separators."""
    world.ingest([0, 1, 3])
    return world.prompt((3, 1, 2, 0))


def scored(world: World, prompt: Prompt, **options: Any) -> list[dict[int, float]]:
    """Each selection's scores by position."""
    chosen = BlendOptions.of(min_tokens=0, **options)
    found = find_sources(prompt, world.store, world.spec, "", "blend", strict=False)
    n, watch = len(prompt.token_ids), Stopwatch()
    with make_loader("sync", world.model, world.store, found, watch, world.codec) as loader:
        run = blend(
            world.model,
            prompt.token_ids,
            found,
            loader,
            chosen,
            world.model.new_cache(n),
            world.model.rope.tables(n),
            watch,
        )
    return [
        dict(zip(positions.tolist(), scores.tolist(), strict=True))
        for _, positions, scores in run.scores
    ]


def top(scores: dict[int, float], count: int) -> list[int]:
    return sorted(sorted(scores, key=lambda p: (-scores[p], p))[:count])


# question


@pytest.mark.parametrize("name", FAMILIES)
def test_question_takes_what_the_question_looks_at(name: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    prompt = with_a_miss(world)
    (found,) = scored(world, prompt, policy="question", ratio="0.2")
    with torch.inference_mode():
        expected = question_scores(world, prompt, range(1, 4))  # of 4, from a quarter on
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=2e-3, abs=1e-6)
    run = world.prefill(prompt, policy="question", ratio="0.2")
    assert list(run.selected) == top(expected, math.ceil(0.2 * run.cached_tokens))
    assert len(run.selected) == 16
    assert run.per_layer == (16,) * 4


@pytest.mark.parametrize("policy", ["question", "hybrid", "random"])
def test_all_and_then_none(world: World, policy: str) -> None:
    """Where every stage takes all or nothing, nobody has to ask the question."""
    run = world.prefill(
        world.prompt((3, 1, 2, 0)), policy=policy, ratio=("1", "0"), check_layers=(1, 2)
    )
    hits = run.cached_tokens - len(world.chunks[3].token_ids)  # the first chunk is exact
    assert run.selected == ()
    assert run.per_layer == (hits, hits, hits, 0)


@pytest.mark.parametrize(
    ("params", "layers", "choices"),
    [
        ("layers=0", range(1), {}),
        ("layers=0-3", range(4), {}),
        ("layers=2-2", range(2, 3), {}),
        ("heads=max", range(1, 4), {"heads": "max"}),
        ("weight=none", range(1, 4), {"weight": "none"}),
        ("weight=none,layers=1-2,heads=max", range(1, 3), {"weight": "none", "heads": "max"}),
        ("layers=1-3,heads=sum,weight=value", range(1, 4), {}),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_question_has_parameters(
    name: str, params: str, layers: range, choices: dict[str, str], tmp_path: Path
) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    prompt = with_a_miss(world)
    (found,) = scored(world, prompt, policy=f"question:{params}", ratio="0.2")
    with torch.inference_mode():
        expected = question_scores(world, prompt, layers, **choices)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=2e-3, abs=1e-6)


def test_layers_that_the_model_lacks_are_refused_before_any_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.store, "find", lambda *_, **__: pytest.fail("it looked"))
    for spec in ("question:layers=99", "question:layers=2-4"):
        with pytest.raises(UsageError, match="is not in this model of 4 layers"):
            world.prefill(world.prompt((1, 0)), policy=spec)


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3-window"])
def test_reading_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """The KV cache is that of a blend which was told the same tokens without asking."""
    world = make_world(BY_NAME[name], tmp_path)
    prompt = with_a_miss(world)
    asked = world.prefill(prompt, policy="question", ratio="0.2")
    told = world.prefill(prompt, indices=asked.selected, transfer=True)
    torch.testing.assert_close(asked.logits, told.logits, rtol=0, atol=1e-5)
    for a, b in zip(world.kv(asked), world.kv(told), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_everything_chosen_by_the_question_is_a_full_prefill(world: World) -> None:
    """Also where it was asked, and its own KV lay in the cache meanwhile."""
    prompt = world.prompt((3, 1, 0, 2))
    for options in ({"threshold": "0.9999999999"}, {"ratio": "0.99999999"}):
        run = world.prefill(prompt, policy="question", **options)
        assert len(run.selected) == len(stored_kv(world, prompt).hits)
        torch.testing.assert_close(run.logits[0], world.full(prompt), rtol=0, atol=1e-4)


def test_another_question_wants_other_tokens(world: World) -> None:
    one, two = (world.prompt((3, 1, 0, 2), suffix=s) for s in ((9, 8, 7), (200, 201, 202)))
    chosen = [world.prefill(p, policy="question", ratio="0.2").selected for p in (one, two)]
    assert chosen[0] != chosen[1]


# attention


@pytest.mark.parametrize("name", ["llama", "mistral-window", "smollm3-window", "gemma3"])
@pytest.mark.parametrize("check", [1, 2])
def test_attention_compares_outputs_at_the_check_layer(
    name: str, check: int, tmp_path: Path
) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    prompt = with_a_miss(world)
    options: dict[str, Any] = dict(policy="attention", ratio="0.2", check_layers=check)
    (found,) = scored(world, prompt, **options)
    with torch.inference_mode():
        expected = output_deviation(world, prompt, check)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=2e-3, abs=1e-6)
        run = world.prefill(prompt, **options)
        chosen = list(run.selected)
        assert chosen == top(expected, 16)
        # Nothing of the comparison stays behind.
        hits = list(expected)
        layers = [hits] * (check + 1) + [chosen] * (3 - check)
        expected_kv = recomputed(world, prompt, layers, moved=False)
    for layer in range(4):
        k, v = kv_of(run, layer)
        torch.testing.assert_close(k, expected_kv.k[layer], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(v, expected_kv.v[layer], rtol=1e-4, atol=2e-4)


def output_deviation(world: World, prompt: Prompt, check: int) -> dict[int, float]:
    """Squared distance of what each hit's own query reads from fresh and from stored KV."""
    slow, n, kv = (
        Slow(world, len(prompt.token_ids)),
        len(prompt.token_ids),
        stored_kv(world, prompt),
    )
    x = {p: slow.embed(prompt.token_ids[p]) for p in range(n) if p not in kv.exact}
    for layer in range(check + 1):
        queries, fresh, cached = {}, [], []
        for p in range(n):
            pair = None if p not in kv.k else (kv.k[p][layer], kv.v[p][layer])
            if p in x:
                q, k, v = slow.projected(layer, x[p])
                queries[p] = slow.turn(layer, p, q)
            else:
                assert pair is not None
                k, v = pair
            fresh.append((slow.turn(layer, p, k), v))
            cached.append(fresh[-1] if pair is None else (slow.turn(layer, p, pair[0]), pair[1]))
        sides = [[torch.stack(x) for x in zip(*side, strict=True)] for side in (fresh, cached)]
        if layer == check:
            outputs = [
                {p: slow.output(layer, p, queries[p], *side) for p in kv.hits} for side in sides
            ]
            return {p: float((outputs[0][p] - outputs[1][p]).square().sum()) for p in kv.hits}
        for p in x:
            x[p] = slow.finish(layer, x[p], slow.output(layer, p, queries[p], *sides[0]))
    raise AssertionError


# first-k and hybrid


def test_first_k_of_each_chunk(world: World) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    chunks = stored_kv(world, prompt).chunks
    for k in (0, 1, 5, 1000):
        run = world.prefill(prompt, policy=f"first-k:k={k}", ratio="0.5")
        assert list(run.selected) == [p for chunk in chunks for p in chunk[:k]]
    run = world.prefill(prompt, policy="first-k", ratio="0.1")
    # 11 of three chunks: the first three of each, then the fourth of the first two.
    wanted = [p for n, chunk in zip((4, 4, 3), chunks, strict=True) for p in chunk[:n]]
    assert list(run.selected) == wanted
    wide = world.prefill(prompt, policy="first-k", ratio="0.3").selected
    assert set(wanted) < set(wide)


def test_first_k_counts_from_the_chunks_own_beginning() -> None:
    offsets = torch.tensor([0, 1, 2, 0, 1])
    candidates = Candidates(torch.tensor([10, 11, 12, 30, 31]), offsets)
    policy = make_policy("first-k:k=1")
    assert policy.count(candidates, 99) == 2
    assert select(policy.score(candidates), 2).tolist() == [0, 3]


def two_views(by_value: list[float], by_key: list[float]) -> Candidates:
    """Tokens whose deviation of V and of K is as given."""
    n = len(by_value)
    zero = torch.zeros(n, 1, 1)
    fresh = LayerKV(
        torch.tensor(by_key).sqrt().view(n, 1, 1), torch.tensor(by_value).sqrt().view(n, 1, 1)
    )
    at = torch.arange(n)
    return Candidates(at, at, fresh=fresh, cached=LayerKV(zero, zero))


def order(spec: str, candidates: Candidates) -> list[int]:
    """Candidates in the order in which more and more of the budget picks them."""
    scores, found = make_policy(spec).score(candidates), []
    for count in range(1, len(candidates.positions) + 1):
        picked = select(scores, count).tolist()
        (new,) = set(picked) - set(found)
        found.append(new)
    return found


def test_hybrid_takes_turns() -> None:
    candidates = two_views([8.0, 7, 6, 5, 0, 1, 2, 3], [0.0, 1, 2, 3, 8, 7, 6, 5])
    assert order("hybrid:value=1,key=1", candidates) == [0, 4, 1, 5, 2, 6, 3, 7]
    # Three of value's for one of key's.
    assert order("hybrid:value=3,key=1", candidates)[:4] == [0, 1, 2, 4]
    assert order("hybrid:value=0.75,key=0.25", candidates) == order(
        "hybrid:value=3,key=1", candidates
    )
    assert order("hybrid:value=1", candidates) == order("value", candidates)


def test_what_two_policies_pick_counts_once() -> None:
    candidates = two_views([9.0, 1, 5, 4], [9.0, 6, 2, 3])
    assert order("hybrid:value=1,key=1", candidates)[:3] == [0, 1, 2]


def test_hybrid_is_nested_and_blends(world: World) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    for spec in ("hybrid", "hybrid:question=0.7,value=0.3", "hybrid:attention=1,question=2"):
        chosen: set[int] = set()
        for ratio, count in (("0.1", 11), ("0.3", 33), ("0.6", 66)):
            run = world.prefill(prompt, policy=spec, ratio=ratio)
            assert chosen < set(run.selected)
            chosen = set(run.selected)
            assert len(chosen) == count


def test_hybrid_of_the_question_and_deviation_picks_from_both(world: World) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    options: dict[str, Any] = dict(ratio="0.3", check_layers=2)
    by_value = scored(world, prompt, policy="value", **options)[0]
    with torch.inference_mode():
        by_question = question_scores(world, prompt, range(1, 4))
    run = world.prefill(prompt, policy="hybrid:question=1,value=1", **options)
    picked: set[int] = set()
    for a, b in zip(top_first(by_question), top_first(by_value), strict=True):
        for p in (a, b):
            if len(picked) < 33:
                picked.add(p)
    # Of the last pair, taken at the same time, the lower one is picked.
    assert len(picked ^ set(run.selected)) <= 2
    assert len(run.selected) == 33


def top_first(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda p: (-scores[p], p))


# Thresholds


def test_covering_is_exact_at_its_ends() -> None:
    for scores in ([3.0, 1, 0, 0], [0.0, 0], [math.nan, 1], [], [-1.0, -2]):
        tensor = torch.tensor(scores)
        assert covering(tensor, Decimal(0)) == 0
        assert covering(tensor, Decimal(1)) == len(scores)


@pytest.mark.parametrize(
    ("scores", "share", "count"),
    [
        ([5.0, 3, 2], "0.5", 1),
        ([5.0, 3, 2], "0.51", 2),
        ([5.0, 3, 2], "0.8", 2),
        ([2.0, 5, 3], "0.81", 3),
        ([1.0, 1, 1, 1], "0.5", 2),  # ties
        ([1.0, 1, 1, 1], "0.500001", 3),
        ([1.0, 0, 0], "0.99", 1),
        ([1.0, 0, 0], "0.99999999999999999999999999", 1),
        ([1.0, 1], "1e-40", 1),
        ([0.0, 0, 0], "0.5", 0),  # nothing to hold
        ([-3.0, -1], "0.5", 0),
        ([-3.0, 1], "0.9", 1),
        ([math.nan, 5, 5], "0.9", 1),  # what is not a number holds all
        ([math.inf, math.nan, 1], "0.75", 2),
        ([3e38, 3e38, 3e38], "0.5", 2),  # whose sum is no float32
        ([], "0.5", 0),
    ],
)
def test_covering(scores: list[float], share: str, count: int) -> None:
    assert covering(torch.tensor(scores), Decimal(share)) == count


def test_covering_is_monotone() -> None:
    scores = torch.rand(500, generator=torch.Generator().manual_seed(0)) ** 4
    counts = [covering(scores, Decimal(n) / 100) for n in range(101)]
    assert all(a <= b for a, b in pairwise(counts))
    assert counts[0] == 0
    assert counts[100] == 500
    for n in range(1, 100):
        kept = scores.sort(descending=True).values.double()
        assert kept[: counts[n]].sum() >= n / 100 * kept.sum() * (1 - 1e-12)
        assert kept[: counts[n] - 1].sum() < n / 100 * kept.sum()


@pytest.mark.parametrize("policy", AMOUNTS)
def test_thresholds_select_what_holds_their_share(world: World, policy: str) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    before: set[int] = set()
    for share in ("0.2", "0.5", "0.8"):
        run = world.prefill(prompt, policy=policy, threshold=share)
        (scores,) = scored(world, prompt, policy=policy, threshold=share)
        total = sum(scores.values())
        held = sorted((scores[p] for p in run.selected), reverse=True)
        assert sum(held) >= float(share) * total * (1 - 1e-6)
        assert sum(held[:-1]) < float(share) * total
        assert list(run.selected) == top(scores, len(held))
        assert before < set(run.selected)
        before = set(run.selected)


@pytest.mark.parametrize("policy", AMOUNTS)
def test_threshold_0_is_reuse_and_1_full_prefill(
    world: World, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    full = world.prefill(prompt, policy=policy, threshold=1)
    torch.testing.assert_close(full.logits[0], world.full(prompt), rtol=0, atol=1e-4)
    assert len(full.selected) == full.cached_tokens
    reuse = world.prefill(prompt, mode="reuse").logits
    monkeypatch.setattr(world.model, "mass", lambda *_: pytest.fail("it asked"))
    none = world.prefill(prompt, policy=policy, threshold=0)
    assert none.selected == ()
    assert none.per_layer == (0,) * 4
    assert torch.equal(none.logits, reuse)


def test_several_check_layers_with_a_threshold(world: World) -> None:
    prompt = world.prompt((3, 1, 0, 2))
    for policy in AMOUNTS:
        one = world.prefill(prompt, policy=policy, threshold="0.6", check_layers=1)
        run = world.prefill(prompt, policy=policy, threshold="0.6", check_layers=(1, 2))
        # The share of the share: fewer, all of them among the first.
        assert set(run.selected) < set(one.selected)
        assert run.per_layer[2] == len(one.selected)
        assert run.per_layer[3] == len(run.selected)
        assert torch.isfinite(run.logits).all()


def test_policies_without_amounts_take_no_threshold() -> None:
    for name in set(POLICY_NAMES) - set(AMOUNTS):
        indices = [1] if name == "explicit" else None
        with pytest.raises(UsageError, match=f"{name} has no amounts"):
            BlendOptions.of(policy=name, threshold="0.5", indices=indices)
    for share in ("-0.1", "1.1", "nan", "inf", "most", ""):
        with pytest.raises(UsageError, match="threshold"):
            BlendOptions.of(threshold=share)


# The default policy's identities


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_identities_of_the_default_policy(tiny: Any, tmp_path: Path) -> None:
    world = make_world(tiny, tmp_path)
    default = BlendOptions().policy
    prompt = world.prompt((2, 0, 3, 1))
    missed = world.prefill(prompt, policy=default)
    torch.testing.assert_close(missed.logits[0], world.full(prompt), rtol=0, atol=1e-4)
    world.ingest()
    for options in ({"ratio": 1}, {"ratio": "0.99999999"}, {"threshold": 1}):
        run = world.prefill(prompt, policy=default, **options)
        torch.testing.assert_close(run.logits[0], world.full(prompt), rtol=0, atol=1e-4)
    reuse = world.prefill(prompt, mode="reuse").logits
    for options in ({"ratio": 0}, {"threshold": 0}):
        assert torch.equal(world.prefill(prompt, policy=default, **options).logits, reuse)
    runs = [
        world.prefill(prompt, policy=default, ratio="0.3", loader=loader)
        for loader in (*LOADER_NAMES, LOADER_NAMES[0])
    ]
    for run in runs[1:]:
        assert torch.equal(run.logits, runs[0].logits)
        assert run.selected == runs[0].selected
    wider = world.prefill(prompt, policy=default, ratio="0.5")
    assert set(runs[0].selected) < set(wider.selected)


# Specs


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "policy '' is unknown"),
        ("best", "policy 'best' is unknown"),
        (":", "is no parameter"),
        ("question:", "is no parameter"),
        ("question:layers=", "is no parameter"),
        ("question:=3", "is no parameter"),
        ("question:layers", "is no parameter"),
        ("question:layers=8-20,layers=3", "is no parameter"),
        ("question:layers=8-20,", "is no parameter"),
        ("question:layers=20-8", "write the lower one first"),
        ("question:layers=-8", "is not a whole number"),
        ("question:layers=8-", "is not a whole number"),
        ("question:layers=1-2-3", "is not a whole number"),
        ("question:layers=٣", "is not a whole number"),
        ("question:layers=1.5", "is not a whole number"),
        ("question:layers=99999999999999999999", "is not a whole number"),
        ("question:heads=most", "use one of sum, max"),
        ("question:weight=V", "use one of value, none"),
        ("question:size=3", "no parameter 'size'"),
        ("value:k=3", "no parameter 'k'"),
        ("random:seed=3", "no parameter 'seed'"),
        ("explicit:at=3", "no parameter 'at'"),
        ("first-k:k=-1", "is not a whole number"),
        ("first-k:k=1e3", "is not a whole number"),
        ("hybrid:question=0", "is not a number above 0"),
        ("hybrid:question=-1", "is not a number above 0"),
        ("hybrid:question=nan", "is not a number above 0"),
        ("hybrid:question=inf", "is not a number above 0"),
        ("hybrid:question=1e-400", "is not a number above 0"),
        ("hybrid:question=1e7", "is not a number above 0"),
        ("hybrid:hybrid=1", "'hybrid' can have no share"),
        ("hybrid:explicit=1", "'explicit' can have no share"),
        ("hybrid:question:layers=1", "can have no share"),
        ("Question", "unknown"),
        ("quéstion", "unknown"),
        ("question\n", None),  # blanks around are no matter
        (" question : heads = max ", None),
        ("q\x00", "unknown"),
        ("q" * 100_000, "unknown"),
        ("question:" + "k" * 100_000, "is no parameter"),
        ("hybrid:" + "k" * 100_000 + "=1", "can have no share"),
        ("hybrid:value=" + "1" * 100_000, "is not a number above 0"),
        ("question:layers=1" + "0" * 100_000, "is not a whole number"),
    ],
)
def test_specs(spec: str, words: str | None) -> None:
    if words is None:
        assert make_policy(spec).name == "question"
        return
    with pytest.raises(UsageError) as refused:
        make_policy(spec)
    text = f"{refused.value.message} {refused.value.hint}"
    assert words in text
    assert len(text) < 300
