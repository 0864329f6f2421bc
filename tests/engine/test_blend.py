"""The identities blending must keep, against transformers, on tiny models in float32."""

import itertools
import math
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from cache_store.errors import CacheblendError, UsageError
from engine.blend import blend as run_blend
from engine.loaders import LOADER_NAMES, make_loader
from engine.options import BlendOptions
from engine.policies import POLICY_NAMES, budget, make_policy, select
from engine.sources import find_sources
from engine.timing import Stopwatch
from tests.engine.blend_world import World, ids, make_world
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
SCORED = [name for name in POLICY_NAMES if name != "explicit"]
DEVIATION = ["value", "key", "key+value"]
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(BY_NAME["llama"], tmp_path)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return float((a - b).abs().max()) <= tolerance


# Identities


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_ratio_1_equals_full_prefill_in_any_order(tiny, tmp_path: Path) -> None:
    world = make_world(tiny, tmp_path)
    world.ingest()
    for order, policy in zip(ORDERS, itertools.cycle(SCORED), strict=False):
        prompt = world.prompt(order)
        run = world.prefill(prompt, ratio=1, policy=policy)
        assert close(run.logits[0], world.full(prompt))
        assert len(run.selected) == run.cached_tokens > 0


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_everything_selected_layer_by_layer_equals_full_prefill(tiny, tmp_path: Path) -> None:
    """Not the short cut of ratio 1: the layer loop itself, with every cached token selected.

    The first chunk is exact and stays as stored, the others are computed among stored KV.
    """
    world = make_world(tiny, tmp_path)
    world.ingest()
    prompt = world.prompt((1, 3, 0))
    cached = [p for s in prompt.segments if s.kind == "chunk" for p in range(s.start, s.end)]
    expected = world.full(prompt)
    # A ratio just under 1 rounds up to every token; explicit positions skip the full layers.
    almost = Decimal(1) - Decimal("1e-9")
    runs = [
        world.prefill(prompt, ratio=almost, policy=name, check_layers=1, loader=loader)
        for name, loader in zip(SCORED, itertools.cycle(LOADER_NAMES), strict=False)
    ]
    runs.append(world.prefill(prompt, policy="explicit", indices=cached))
    runs.append(world.prefill(prompt, ratio=(almost, almost), check_layers=(1, 2)))
    for run in runs:
        assert close(run.logits[0], expected)


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_one_chunk_behind_its_prefix_equals_full_prefill_at_ratio_0(tiny, tmp_path: Path) -> None:
    """So stored KV is placed exactly: K before RoPE, the same positions, the right regime."""
    world = make_world(tiny, tmp_path)
    world.ingest()
    regime = world.model.rope.regime
    for index, (chunk, loader) in enumerate(zip(world.chunks, LOADER_NAMES, strict=True)):
        prompt = world.prompt((index,))
        run = world.prefill(prompt, ratio=0, loader=loader)
        same = regime(len(prompt.token_ids)) == regime(len(world.prefix) + len(chunk.token_ids))
        assert run.found[1].status == ("exact" if same else "hit")
        assert close(run.logits[0], world.full(prompt)) or not same


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "smollm3-window", "phi3-longrope-long", "gemma3-linear-scale"]
)
def test_all_misses_equal_full_prefill(name: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    for policy, loader in zip(SCORED, itertools.cycle(LOADER_NAMES), strict=False):
        prompt = world.prompt((2, 0, 1))
        run = world.prefill(prompt, ratio="0.16", policy=policy, loader=loader)
        assert {s.status for s in run.used if s.segment.kind == "chunk"} == {"miss"}
        assert close(run.logits[0], world.full(prompt))


def test_reuse_computes_suffix_separators_and_misses_only(world: World, monkeypatch) -> None:
    world.ingest([0, 1, 3])
    prompt = world.prompt((3, 2, 0, 1))
    computed: list[int] = []
    keys_values = world.model.keys_values

    def counting(layer: int, normed: torch.Tensor):
        computed.append(len(normed))
        return keys_values(layer, normed)

    monkeypatch.setattr(world.model, "keys_values", counting)
    expected = len(world.suffix) + 3 * len(world.separator) + len(world.chunks[2].token_ids)
    ways = [{"ratio": 0}, {"mode": "reuse"}]
    for policy, loader, options in itertools.product(SCORED, LOADER_NAMES, ways):
        computed.clear()
        run = world.prefill(prompt, policy=policy, loader=loader, **options)
        assert computed == [expected] * 4
        assert run.selected == ()
        assert run.per_layer == (0,) * 4


def test_reuse_keeps_stored_values_and_turns_stored_keys(world: World) -> None:
    """Every cached row of V is the stored one; of K, the stored one rotated to its new place."""
    world.ingest()
    prompt = world.prompt((2, 1, 0, 3))
    k, v = world.kv(world.prefill(prompt, ratio=0))
    ((cos, sin),) = world.model.rope.tables(len(prompt.token_ids)).kinds
    for segment in (s for s in prompt.segments if s.kind == "chunk"):
        match = world.store.find(world.spec, segment.token_ids, prompt.before(segment))
        assert match is not None
        with world.store.open_entry(match.key) as entry:
            for layer in range(4):
                shape = (-1, 2, 8)
                k0, v0 = (
                    torch.frombuffer(bytearray(b), dtype=torch.float32).view(shape)
                    for b in entry.layer(layer)
                )
                rows = slice(segment.start, segment.end)
                turned = torch.cat(
                    [
                        k0[..., :4] * cos[rows, None, :4] - k0[..., 4:] * sin[rows, None, 4:],
                        k0[..., 4:] * cos[rows, None, 4:] + k0[..., :4] * sin[rows, None, 4:],
                    ],
                    -1,
                )
                assert close(k[layer, :, rows].transpose(0, 1), turned, 1e-6)
                assert torch.equal(v[layer, :, rows].transpose(0, 1), v0)


def test_same_call_twice_gives_the_same(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    for policy, loader in itertools.product(SCORED, LOADER_NAMES):
        options = {"policy": policy, "ratio": "0.3", "loader": loader}
        one, two = (world.prefill(prompt, **options) for _ in range(2))
        assert torch.equal(one.logits, two.logits)
        assert one.selected == two.selected
        assert all(torch.equal(a, b) for a, b in zip(world.kv(one), world.kv(two), strict=True))


# What is selected and computed


def reference_blend(world: World, prompt, chosen: set[int], check: int) -> torch.Tensor:
    """A slow, separate account of the algorithm: one token at a time, dense masks, per layer.

    Tokens not in `chosen` (and not always computed) keep stored K and V after the check layer;
    up to it every token that is not exact has fresh ones. Returns the last token's logits.
    """
    model, n = world.model, len(prompt.token_ids)
    stored: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    exact: set[int] = set()
    for segment in prompt.segments:
        match = world.store.find(world.spec, segment.token_ids, prompt.before(segment))
        if match is None:
            continue
        with world.store.open_entry(match.key) as entry:
            for layer in range(4):
                k, v = (
                    torch.frombuffer(bytearray(b), dtype=torch.float32).view(-1, 2, 8)
                    for b in entry.layer(layer)
                )
                for row in range(len(segment.token_ids)):
                    ks, vs = stored.setdefault(segment.start + row, ([], []))
                    ks.append(k[row])
                    vs.append(v[row])
                    if match.exact:
                        exact.add(segment.start + row)
    tables = model.rope.tables(n)
    x = {p: model.embed(torch.tensor([prompt.token_ids[p]])) for p in range(n) if p not in exact}
    for layer in range(4):
        keys, values = [], []
        for p in range(n):
            row = tables[p : p + 1]
            fresh = p not in stored or (p not in exact and (layer <= check or p in chosen))
            if fresh:
                k, v = model.keys_values(layer, model.norm_in(layer, x[p]))
            else:
                k, v = stored[p][0][layer][None], stored[p][1][layer][None]
            keys.append(model.rotated(layer, k, row)[0])
            values.append(v[0])
        k_all = torch.stack(keys).repeat_interleave(3, 1)  # [N, heads, head_dim]
        v_all = torch.stack(values).repeat_interleave(3, 1)
        live = [p for p in x if p not in stored or layer < check or p in chosen]
        for p in live:
            row = tables[p : p + 1]
            q = model.rotated(layer, model.queries(layer, model.norm_in(layer, x[p])), row)[0]
            window = model.config.windows[layer]
            seen = slice(0 if window is None else max(0, p + 1 - window), p + 1)
            scores = torch.einsum("hd,nhd->hn", q, k_all[seen]) / math.sqrt(8)
            mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), v_all[seen])
            x[p] = model.finish(layer, x[p], mixed.reshape(1, -1))
    return model.logits(x[n - 1])[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", DEVIATION)
@pytest.mark.parametrize("check", [1, 2, 3])
def test_blend_is_the_algorithm(name: str, policy: str, check: int, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    world.ingest([0, 1, 3])
    prompt = world.prompt((3, 2, 0, 1))
    run = world.prefill(prompt, policy=policy, ratio="0.2", check_layers=check)
    with torch.inference_mode():
        expected = reference_blend(world, prompt, set(run.selected), check)
    assert close(run.logits[0], expected)
    # Checked at the last layer, every layer's K and V are fresh; before it, not.
    assert close(run.logits[0], world.full(prompt)) == (check == 3)


@pytest.mark.parametrize("policy", DEVIATION)
def test_deviation_policies_take_the_highest_deviation(world: World, policy: str) -> None:
    """Against fresh K and V from the oracle's own full prefill."""
    world.ingest()
    order, check = (3, 1, 0, 2), 2
    prompt = world.prompt(order)
    run = world.prefill(prompt, policy=policy, ratio="0.25", check_layers=check)
    with torch.no_grad():
        cache = world.oracle(torch.tensor([prompt.token_ids]), use_cache=True).past_key_values
    fresh_k, fresh_v = cache.layers[check].keys[0], cache.layers[check].values[0]
    k, v = world.kv(world.prefill(prompt, ratio=0))
    by_key = (fresh_k - k[check]).square().sum((0, 2))
    by_value = (fresh_v - v[check]).square().sum((0, 2))
    deviation = {"key": by_key, "value": by_value, "key+value": by_key + by_value}[policy]
    hits = [
        p for s in run.found if s.status == "hit" for p in range(s.segment.start, s.segment.end)
    ]
    count = math.ceil(0.25 * run.cached_tokens)
    expected = sorted(sorted(hits, key=lambda p: -float(deviation[p]))[:count])
    assert list(run.selected) == expected


def test_exact_tokens_are_never_computed_below_ratio_1(world: World) -> None:
    world.ingest()
    prompt = world.prompt((1, 0, 2))
    run = world.prefill(prompt, ratio="0.99")
    first = prompt.segments[1]
    assert run.found[1].status == "exact"
    assert not set(range(first.start, first.end)) & set(run.selected)
    # The budget counts every cached token but cannot exceed the eligible ones.
    assert len(run.selected) == run.cached_tokens - len(first.token_ids)


def test_counts_per_layer(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    hits = 21 + 30 + 34
    run = world.prefill(prompt, ratio="0.1", check_layers=2)
    assert run.per_layer == (hits, hits, hits, 11)
    assert len(run.selected) == 11 == math.ceil(0.1 * 110)
    run = world.prefill(prompt, ratio="0.1", policy="random")
    assert run.per_layer == (11,) * 4


def test_several_check_layers_only_shrink(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    for policy in SCORED:
        run = world.prefill(
            prompt, policy=policy, ratio=("0.5", "0.2", "0.1"), check_layers=(1, 2, 3)
        )
        assert run.per_layer[1:] == (
            (85, 55, 22) if make_policy(policy).full_layers else (55, 55, 22)
        )
        assert len(run.selected) == 11
    one = world.prefill(prompt, ratio="0.2", check_layers=(1, 2))  # one ratio serves both
    assert len(one.selected) == 22


def test_two_check_layers_equal_the_algorithm_by_hand(world: World) -> None:
    """The second stage may choose only among the first's, from fresh K and V computed by it."""
    world.ingest()
    prompt = world.prompt((2, 3, 1))
    wide = world.prefill(prompt, ratio="0.5", check_layers=1)
    both = world.prefill(prompt, ratio=("0.5", "0.1"), check_layers=(1, 3))
    assert set(both.selected) < set(wide.selected)


def test_random_is_seeded_and_nested(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))

    def chosen(ratio: str, seed: int) -> set[int]:
        return set(world.prefill(prompt, policy="random", ratio=ratio, seed=seed).selected)

    assert chosen("0.1", 1) == chosen("0.1", 1) != chosen("0.1", 2)
    assert chosen("0.1", 1) < chosen("0.3", 1) < chosen("0.7", 1)


def test_explicit_indices_are_taken_as_they_are(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0))
    second = prompt.segments[3]
    run = world.prefill(prompt, policy="explicit", indices=[second.end - 1, second.start])
    assert run.selected == (second.start, second.end - 1)
    assert world.prefill(prompt, policy="explicit", indices=[]).selected == ()
    for outside in (0, prompt.segments[2].start, len(prompt.token_ids) - 1, 10**6):
        with pytest.raises(UsageError, match=f"position {outside} is not a cached token"):
            world.prefill(prompt, policy="explicit", indices=[outside])


# The mask


def test_a_later_token_never_changes_what_a_recomputed_token_gets(world: World) -> None:
    """Fresh K and V of positions up to p do not depend on any token after p."""
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    chosen = [p for p in range(36, 120) if p % 3 == 0]
    cached = {p for s in prompt.segments if s.kind == "chunk" for p in range(s.start, s.end)}
    chosen = [p for p in chosen if p in cached]
    changed = world.prompt((3, 1, 2, 0), suffix=ids(7, 99))
    border = prompt.segments[5].start  # the first position at which the two prompts differ
    assert prompt.token_ids[:border] == changed.token_ids[:border] != prompt.token_ids
    options = {"policy": "explicit"}
    one = world.prefill(prompt, indices=chosen, **options)
    cached_too = {p for s in changed.segments if s.kind == "chunk" for p in range(s.start, s.end)}
    two = world.prefill(changed, indices=[p for p in chosen if p in cached_too], **options)
    for a, b in zip(world.kv(one), world.kv(two), strict=True):
        assert close(a[:, :, :border], b[:, :, :border], 1e-6)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "smollm3-window", "gemma3"])
def test_poisoned_later_rows_are_never_read(name: str, tmp_path: Path, monkeypatch) -> None:
    """Rows of the KV cache after a block's last query may hold anything, NaN included."""
    world = make_world(BY_NAME[name], tmp_path)
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    expected = world.prefill(prompt, ratio="0.3").logits
    new_cache = world.model.new_cache

    def poisoned(capacity: int):
        cache = new_cache(capacity + 50)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        return cache

    monkeypatch.setattr(world.model, "new_cache", poisoned)
    assert torch.equal(world.prefill(prompt, ratio="0.3").logits, expected)


@pytest.mark.parametrize("options", [{"ratio": "0"}, {"ratio": "0.3", "policy": "value"}])
def test_layers_that_share_memory_do_where_no_question_reads(
    options: dict[str, str], tmp_path: Path, monkeypatch
) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    expected = world.prefill(prompt, **options).logits
    new_cache = world.model.new_cache
    taken = []

    def shared(capacity: int):
        taken.append(new_cache(capacity, passing=True))
        return taken[-1]

    monkeypatch.setattr(world.model, "new_cache", shared)
    assert torch.equal(world.prefill(prompt, **options).logits, expected)
    assert taken[0].k[0].data_ptr() == taken[0].k[-1].data_ptr()
    with pytest.raises(ValueError, match="reads all layers first"):  # and else are refused
        world.prefill(prompt, ratio="0.3", policy="question")


# Prompts of every shape


def test_small_prompts_and_ratios(tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path, sizes=(1, 2, 1), prefix=1, separator=1, suffix=1)
    world.ingest()
    for order in [(0,), (1, 0), (2, 1, 0)]:
        for ratio in ("0", "0.000001", "0.01", "0.5", "1"):
            for policy in SCORED:
                run = world.prefill(world.prompt(order), ratio=ratio, policy=policy)
                assert torch.isfinite(run.logits).all()
                eligible = sum(len(s.segment.token_ids) for s in run.found if s.status == "hit")
                if ratio == "0.000001":
                    assert len(run.selected) == min(1, eligible)


@pytest.mark.parametrize(("prefix", "separator"), [(0, 2), (9, 0), (0, 0)])
def test_prompts_without_prefix_or_separator(prefix: int, separator: int, tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path, prefix=prefix, separator=separator)
    world.ingest()
    prompt = world.prompt((2, 0, 1))
    assert close(world.prefill(prompt, ratio=1).logits[0], world.full(prompt))
    assert close(
        world.prefill(world.prompt((2,)), ratio=0).logits[0], world.full(world.prompt((2,)))
    )
    assert len(world.prefill(prompt, ratio="0.2").selected) == 17


def test_prompt_without_chunks(world: World) -> None:
    prompt = world.prompt(())
    run = world.prefill(prompt)
    assert run.cached_tokens == 0
    assert close(run.logits[0], world.full(prompt))


def test_the_same_chunk_twice(world: World) -> None:
    world.ingest()
    prompt = world.prompt((1, 1, 1))
    assert [s.status for s in run_sources(world, prompt)] == ["exact", "hit", "hit"]
    assert close(world.prefill(prompt, ratio=1).logits[0], world.full(prompt))
    assert len(world.prefill(prompt, ratio="0.5").selected) == 32


def run_sources(world: World, prompt):
    found = find_sources(prompt, world.store, world.spec, "", "blend", strict=False)
    return [s for s in found if s.segment.kind == "chunk"]


def test_one_miss_does_not_stop_the_reuse_of_what_follows(world: World) -> None:
    world.ingest([0, 2, 3])
    prompt = world.prompt((1, 3, 0, 2))
    assert [s.status for s in run_sources(world, prompt)] == ["miss", "hit", "hit", "hit"]
    run = world.prefill(prompt, ratio="0.2")
    assert run.cached_tokens == 30 + 34 + 25


def test_another_system_prompt_still_hits_but_is_not_exact(world: World) -> None:
    world.ingest()
    world.prefix = ids(12, 77)
    prompt = world.prompt((1, 0))
    assert [s.status for s in run_sources(world, prompt)] == ["hit", "hit"]
    strict = world.prefill(prompt, strict_context=True)
    assert {s.status for s in strict.found if s.segment.kind == "chunk"} == {"miss"}
    assert close(strict.logits[0], world.full(prompt))


def test_kv_that_saw_other_chunks_is_not_reused_as_if_alone(world: World) -> None:
    """Stored behind prefix + chunk 0, chunk 1 is exact there, and a plain hit elsewhere."""
    world.ingest([0])
    before = world.prefix + world.chunks[0].token_ids + world.separator
    writer = type(world.writer)(world.model, world.store, world.spec, before)
    writer.write(world.chunks[1].token_ids)
    assert [s.status for s in run_sources(world, world.prompt((0, 1)))] == ["exact", "exact"]
    assert [s.status for s in run_sources(world, world.prompt((1, 0)))] == ["hit", "hit"]
    run = world.prefill(world.prompt((0, 1)), ratio=0)
    assert close(run.logits[0], world.full(world.prompt((0, 1))))
    world.ingest([1])  # now both contexts are known: each prompt gets its own
    assert [s.status for s in run_sources(world, world.prompt((1, 0)))] == ["exact", "hit"]


def test_modes(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0))
    for mode in ("full", "prefix"):
        assert close(world.prefill(prompt, mode=mode).logits[0], world.full(prompt))
    assert world.prefill(prompt, mode="full").bytes_loaded == 0
    leading = len(world.prefix) + len(world.chunks[3].token_ids)
    assert world.prefill(prompt, mode="prefix").bytes_loaded == leading * world.spec.token_bytes
    statuses = [s.status for s in world.prefill(prompt, mode="prefix").used]
    assert statuses == ["exact", "exact", *["computed"] * 5]
    reuse = world.prefill(prompt, mode="reuse", ratio="0.5")
    assert torch.equal(reuse.logits, world.prefill(prompt, ratio=0).logits)


def test_too_few_cached_tokens_are_prefilled_and_said(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0))
    run = world.prefill(prompt, min_tokens=77)
    assert run.skipped is not None
    assert "76 cached tokens" in run.skipped
    assert close(run.logits[0], world.full(prompt))
    assert {s.status for s in run.used} == {"computed"}
    assert run.selected == ()
    assert world.prefill(prompt, min_tokens=76).skipped is None


def test_prompt_longer_than_the_context_is_refused(world: World) -> None:
    prompt = world.prompt((0,), suffix=ids(600, 5))
    with pytest.raises(UsageError, match=r"no room in the model's context of 512"):
        world.prefill(prompt)


def test_damaged_entry_is_named_left_out_and_changes_nothing(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0))
    clean_miss = make_clean_miss(world, prompt)
    match = world.store.find(
        world.spec, world.chunks[1].token_ids, prompt.before(prompt.segments[3])
    )
    path = next(p for p in entry_files(world) if p.stat().st_size == entry_size(world, match.key))
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1  # in the last layer: found when the blend is nearly done
    path.write_bytes(raw)
    run = world.prefill(prompt, ratio="0.3")
    assert len(run.notes) == 1
    assert "computed instead" in run.notes[0]
    assert [s.status for s in run.found if s.segment.kind == "chunk"] == ["exact", "miss", "hit"]
    assert torch.equal(run.logits, clean_miss)
    assert world.prefill(prompt, ratio="0.3").notes == ()  # gone from the store
    world.ingest()
    assert world.prefill(prompt, ratio="0.3").found[3].status == "hit"


def make_clean_miss(world: World, prompt) -> torch.Tensor:
    found = find_sources(prompt, world.store, world.spec, "", "blend", strict=False)
    left = [
        s if s.segment.chunk_id != world.chunks[1].chunk_id else type(s)(s.segment, "miss")
        for s in found
    ]
    options = BlendOptions.of(ratio="0.3", policy="value", min_tokens=0)
    cache = world.model.new_cache(len(prompt.token_ids))
    tables = world.model.rope.tables(len(prompt.token_ids))
    watch = Stopwatch()
    with make_loader("sync", world.model, world.store, left, watch, world.codec) as loader:
        ids_ = prompt.token_ids
        return run_blend(world.model, ids_, left, loader, options, cache, tables, watch).logits


def entry_files(world: World) -> list[Path]:
    root = Path(world.store.path)
    return list(root.rglob("*.kv"))


def entry_size(world: World, key: str) -> int:
    sizes = {len(c.token_ids): i for i, c in enumerate(world.chunks)}
    assert len(sizes) == len(world.chunks)  # sizes tell the files apart
    with world.store.open_entry(key) as entry:
        tokens = len(entry.header.token_ids)
    assert tokens == 21
    files = sorted(p.stat().st_size for p in entry_files(world))
    return files[1]  # prefix (9), then chunk 1 (21), the smallest chunk


# Options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ratio": "-0.1"}, "outside 0 to 1"),
        ({"ratio": "1.0001"}, "outside 0 to 1"),
        ({"ratio": "nan"}, "outside 0 to 1"),
        ({"ratio": "inf"}, "outside 0 to 1"),
        ({"ratio": "many"}, "not a number"),
        ({"ratio": ()}, "at least one"),
        ({"check_layers": 0}, "check layer 0"),
        ({"check_layers": (0, 1), "ratio": ("0.2", "0.1")}, "check layer 0"),
        ({"check_layers": -1}, "below 0"),
        ({"check_layers": (2, 1)}, "must rise"),
        ({"check_layers": (1, 1)}, "must rise"),
        ({"check_layers": ()}, "at least one"),
        ({"check_layers": (1, 2), "ratio": ("0.1", "0.2")}, "must not rise"),
        ({"check_layers": (1, 2), "ratio": ("0.1",) * 3}, "3 ratios for 2 check layers"),
        ({"policy": "best"}, "unknown"),
        ({"policy": "explicit"}, "needs positions"),
        ({"indices": [1]}, "chooses its own"),
        ({"mode": "fast"}, "unknown"),
        ({"loader": "magic"}, "unknown"),
        ({"min_tokens": -1}, "negative"),
    ],
)
def test_bad_options_are_refused(options: dict, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        BlendOptions.of(**options)


def test_check_layer_beyond_the_model_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="check layer 4 is not in this model of 4 layers"):
        world.prefill(world.prompt((0,)), check_layers=4)


@pytest.mark.parametrize(
    ("ratio", "cached", "expected"),
    [("0.07", 100, 7), ("0.16", 25, 4), ("0.16", 26, 5), ("0.29", 100, 29), ("1e-9", 5, 1)],
)
def test_budget_is_exact_in_decimal(ratio: str, cached: int, expected: int) -> None:
    assert budget(Decimal(ratio), cached, cached) == expected
    (parsed,) = BlendOptions.of(ratio=float(ratio)).ratios
    assert budget(parsed, cached, cached) == expected


def test_ties_go_to_the_lower_index() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 3.0])
    assert select(scores, 2).tolist() == [1, 2]
    assert select(scores, 5).tolist() == [0, 1, 2, 4, 5]
    assert select(torch.zeros(1000), 10).tolist() == list(range(10))
    assert select(torch.tensor([1.0, torch.nan, 2.0]), 1).tolist() == [1]
    assert select(scores, 0).tolist() == []


def test_every_policy_can_be_made() -> None:
    for name in POLICY_NAMES:
        policy = make_policy(name, indices=[1] if name == "explicit" else None)
        assert policy.name == name


def test_too_many_open_files_cost_no_entry(tmp_path: Path) -> None:
    """What says nothing of a file must not be taken for damage and removed."""
    resource = pytest.importorskip("resource")
    world = make_world(BY_NAME["llama"], tmp_path, sizes=tuple(range(4, 40)))
    world.ingest()
    stored = len(list(world.store.entries()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Path("/proc/self/fd")
    used = {int(file.name) for file in files.iterdir()} if files.is_dir() else set(range(40))
    # The limit is on numbers, and other tests may have left gaps: 12 are to be free below it.
    twelfth = [number for number in range(len(used) + 13) if number not in used][11]
    resource.setrlimit(resource.RLIMIT_NOFILE, (twelfth + 1, hard))
    try:
        with pytest.raises(CacheblendError, match="open files"):
            world.prefill(world.prompt(range(15)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(world.store.entries())) == stored
    assert len(world.prefill(world.prompt(range(15))).selected) > 0


def test_a_cut_off_entry_is_named_too(world: World) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0))
    for path in entry_files(world):
        path.write_bytes(path.read_bytes()[:-64])
    run = world.prefill(prompt)
    assert len(run.notes) >= 3
    assert all("chunk file" in note and "computed instead" in note for note in run.notes)
    assert close(run.logits[0], world.full(prompt))


@pytest.mark.parametrize("mode", ["reuse", "full", "prefix"])
def test_chosen_positions_need_mode_blend(mode: str) -> None:
    with pytest.raises(UsageError, match=f"mode {mode} recomputes no chosen tokens"):
        BlendOptions.of(mode=mode, policy="explicit", indices=[5])


def test_masks_beyond_what_is_kept_are_made_anew(world: World, monkeypatch) -> None:
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    expected = world.prefill(prompt, ratio="0.5").logits
    monkeypatch.setattr("engine.attention.KEPT_MASK_BYTES", 0)
    assert torch.equal(world.prefill(prompt, ratio="0.5").logits, expected)


def test_blocks_of_queries_add_up(world: World, monkeypatch) -> None:
    """Several blocks a selection, each with its own mask, as in long prompts."""
    world.ingest()
    prompt = world.prompt((3, 1, 0, 2))
    expected = world.prefill(prompt, ratio="0.5").logits
    monkeypatch.setattr("engine.attention.BLOCK", 7)
    assert close(world.prefill(prompt, ratio="0.5").logits, expected)


def test_chunk_longer_than_the_context_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="does not fit the model's context"):
        world.writer.write(ids(510, 8))


def test_ratio_of_many_digits_is_exact() -> None:
    assert budget(Decimal("0.1000000000000000000000000000000000001"), 10, 10) == 2
