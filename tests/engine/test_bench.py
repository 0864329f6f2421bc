"""What the benches measure: turns, prompts, rows and what they say about the bound."""

import tempfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import CacheblendError, UsageError
from engine import Engine
from engine.bench import layout
from engine.bench.conditions import look_around
from engine.bench.decode import measure_decode
from engine.bench.fit import linear_fit
from engine.bench.ingest import measure_ingest
from engine.bench.layout import standard_length, standard_prompt, stored, text_ids
from engine.bench.load import LoadSweep, measure_load
from engine.bench.measure import Spread, in_turn, paired
from engine.bench.ttft import TtftRow, TtftSweep, fit_costs, measure_ttft
from engine.bound import full_prefill, predicted, speedup
from engine.loaders import LOADER_NAMES
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 512}), folder)
    write_tokenizer(folder)
    return Engine.load(folder, device="cpu", dtype="fp32")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def silent(text: str) -> None:
    pass


def test_every_way_has_its_turn_in_every_round_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    rounds: list[int] = []

    def way(name: str) -> int:
        order.append(name)
        return len(order)

    ways = {"a": lambda: way("a"), "b": lambda: way("b")}
    assert in_turn(ways, 2, rounds.append) == {"a": [3, 5], "b": [4, 6]}
    assert order == ["a", "b"] * 3
    assert rounds == [0, 1, 2]


def test_pairs_are_of_one_round() -> None:
    """A machine that slows down to half its speed changes no ratio."""
    ratios = paired([4.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert ratios == Spread((4.0, 2.0, 2.0))
    assert (ratios.median, ratios.low, ratios.high) == (2.0, 2.0, 4.0)


def test_fit() -> None:
    line = linear_fit([1, 2, 4], [5, 7, 11])
    assert line is not None
    assert (line.slope, line.intercept, line.r2, line.points) == pytest.approx((2, 3, 1, 3))
    bent = linear_fit([0, 1, 2, 3], [0, 1, 4, 9])
    assert bent is not None
    assert bent.r2 == pytest.approx(0.9184, abs=1e-4)
    assert linear_fit([1, 2, 2], [1, 2, 3]) is None  # any line fits


def test_the_standard_prompt_has_chunks_in_another_order_than_the_text() -> None:
    assert standard_length(4096, 8192) == 4096
    assert standard_length(4099, 8192) == 4096
    ids = list(range(1000, 1000 + standard_length(140, 8192)))
    prompt = standard_prompt(ids)
    kinds = [segment.kind for segment in prompt.segments]
    assert kinds == ["prefix", *["chunk"] * 8, "suffix"]
    assert [len(s.token_ids) for s in prompt.segments] == [32, *[10] * 8, 24]
    assert prompt.segments[0].token_ids == tuple(ids[:32])
    assert prompt.segments[1].token_ids == tuple(ids[102:112])
    assert prompt.segments[8].token_ids == tuple(ids[32:42])
    assert prompt.segments[9].token_ids == tuple(ids[-24:])


@pytest.mark.parametrize(("tokens", "context"), [(63, 512), (512, 512), (600, 512)])
def test_prompts_that_cannot_be_are_refused(tokens: int, context: int) -> None:
    with pytest.raises(UsageError):
        standard_length(tokens, context)


def test_text(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = text_ids(tokenizer, 500)
    assert ids == text_ids(tokenizer, 600)[:500]
    assert not tokenizer.special_ids & set(ids)
    assert max(ids) < tokenizer.vocab_size
    assert len(set(ids)) > 100
    word = tokenizer.encode("the watch")
    assert text_ids(tokenizer, len(word) + 1, "the watch") == [*word, word[0]]
    with pytest.raises(UsageError, match="empty"):
        text_ids(tokenizer, 5, "")


def test_the_store_is_gone_afterwards(engine: Engine, temporary: Path) -> None:
    prompt = standard_prompt(text_ids(engine.tokenizer, 120))
    with stored(engine, prompt) as over:
        assert over.store is not None
        assert len(list(temporary.iterdir())) == 1
    assert list(temporary.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), stored(engine, prompt):
        raise KeyboardInterrupt
    assert list(temporary.iterdir()) == []


def test_a_full_disk_is_told_of_before_anything_is_stored(
    engine: Engine, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "STORE_OVERHEAD", 10**18)
    with (
        pytest.raises(CacheblendError, match="are free") as caught,
        stored(engine, standard_prompt(text_ids(engine.tokenizer, 120))),
    ):
        pass
    assert "TMPDIR" in caught.value.hint
    assert list(temporary.iterdir()) == []


SWEEP = TtftSweep(
    tokens=(120, 184),
    ratios=(Decimal("0.1"), Decimal("0.5")),
    policies=("value", "random", "explicit"),
    loaders=("sync", "pipelined"),
    pairs=2,
)


@pytest.fixture(scope="module")
def rows(engine: Engine) -> list[TtftRow]:
    said: list[str] = []
    found = measure_ttft(engine, SWEEP, (), None, said.append)
    rounds = ["storing chunks", "warming up", "round 1 of 2", "round 2 of 2"]
    assert said == [f"{length} tokens: {what}" for length in (120, 184) for what in rounds]
    return found


def test_ttft_has_a_row_for_everything_asked_for(rows: list[TtftRow]) -> None:
    ways = [(r.tokens, r.way, r.policy, r.ratio, r.loader) for r in rows]
    assert len(ways) == len(set(ways)) == 2 * (1 + 2 + 3 * 2 * 2)
    assert ways[0] == (120, "full", None, None, None)
    assert (184, "blend", "explicit", 0.5, "sync") in ways
    for row in rows:
        assert len(row.seconds) == 2
        assert row.min_s <= row.median_s <= row.max_s
        assert row.speedup_min <= row.speedup <= row.speedup_max


def test_every_blend_has_a_bound_and_what_it_reached(engine: Engine, rows: list[TtftRow]) -> None:
    full = rows[0]
    assert (full.speedup, full.bound, full.share, full.computed) == (1, 1, 1, 120)
    config = engine.model.config
    for row in rows:
        assert row.bound is not None
        assert row.share == pytest.approx(row.speedup / row.bound)
        if row.way == "reuse":
            assert (row.recomputed, row.computed) == (0, 24)
        if row.way == "blend":
            size = (row.tokens - 56) // 8
            count = -(-row.ratio * 8 * size // 1) if row.ratio else 0
            assert row.recomputed == count
            assert row.computed == count + 24
    row = next(r for r in rows if r.policy == "explicit" and r.ratio == 0.5 and r.tokens == 120)
    shape = dict(prefix=32, cached=64, exact=8, always=24, ratio=Decimal("0.5"))
    wanted = predicted(config, **shape, policy="explicit")  # type: ignore[arg-type]
    assert row.bound == speedup(full_prefill(config, 120), wanted).overall


def test_ratio_1_computes_everything(engine: Engine) -> None:
    sweep = TtftSweep((120,), (Decimal(1),), ("value",), pairs=1)
    *_, row = measure_ttft(engine, sweep, (), None, silent)
    assert (row.ratio, row.recomputed, row.computed, row.bound) == (1, 64, 120, 1)


def test_loaders_read_the_same_and_choose_the_same_token(rows: list[TtftRow]) -> None:
    for sync in (row for row in rows if row.loader == "sync"):
        key = dict(loader="pipelined", tokens=sync.tokens, way=sync.way)
        key |= dict(policy=sync.policy, ratio=sync.ratio)
        other = next(r for r in rows if all(getattr(r, k) == v for k, v in key.items()))
        assert other.bytes_loaded == sync.bytes_loaded
        assert other.first_token == sync.first_token
        assert sync.stall_s is not None


def test_costs_are_fitted_by_policy_and_loader(rows: list[TtftRow]) -> None:
    fits = {(fit.policy, fit.loader): fit for fit in fit_costs(rows)}
    assert len(fits) == 3 * 2
    assert fits["value", "sync"].points == 2 * (2 + 1)  # both lengths: two ratios, and reuse
    made = [replace(row, median_s=0.5 + 1e-6 * row.computed * row.tokens) for row in rows]
    for fit in fit_costs(made):
        assert (fit.intercept_s, fit.seconds_per_unit, fit.r2) == pytest.approx((0.5, 1e-6, 1))


@pytest.mark.parametrize(
    "change",
    [
        dict(tokens=(120, 4000)),
        dict(policies=("nonsense",)),
        dict(loaders=("nonsense",)),
        dict(check_layer=0),
        dict(check_layer=4),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_refused_first(engine: Engine, change: dict[str, Any]) -> None:
    config = engine.model.config
    with pytest.raises(UsageError):
        replace(SWEEP, **change).check(config.layers, config.context)


def test_load(engine: Engine) -> None:
    sweep = LoadSweep(120, bandwidths=(None, "balanced", 2_000_000), pairs=2)
    config = engine.model.config
    sweep.check(config.layers, config.context)
    rows = measure_load(engine, sweep, None, silent)
    assert [row.loader for row in rows] == list(LOADER_NAMES) * 3
    assert len({row.bytes_loaded for row in rows}) == 1
    free, balanced, slow = (rows[i : i + 4] for i in (0, 4, 8))
    assert all(row.bandwidth is None and not row.balanced for row in free)
    assert all(row.bandwidth and row.balanced for row in balanced)
    assert all(row.bandwidth == 2_000_000 for row in slow)
    for row in slow:
        assert row.load_s >= 0.9 * row.bytes_loaded / 2_000_000
    alone = next(row for row in slow if row.loader == "sync")
    assert alone.stall_share is not None
    assert alone.stall_share > 0.9  # it waits for all that it reads


def test_ingest(engine: Engine, temporary: Path) -> None:
    rows = measure_ingest(engine, [16, 50], 100, 2, None, silent)
    assert [(row.chunk_tokens, row.chunks) for row in rows] == [(16, 6), (50, 2)]
    for row in rows:
        tokens = row.chunk_tokens * row.chunks
        assert row.bytes_written > tokens * 4 * 2 * 2 * 8 * 4  # layers, K and V, heads, dim, fp32
        assert row.tokens_per_s == pytest.approx(2 * tokens / sum(row.seconds))
        assert len(row.prefill_seconds) == 2
    assert list(temporary.iterdir()) == []
    with pytest.raises(UsageError, match="do not fit"):
        measure_ingest(engine, [512], 100, 2, None, silent)


def test_decode(engine: Engine) -> None:
    rows = measure_decode(engine, [20, 40], 6, 2, (), None, silent)
    assert [(row.tokens, row.way, row.output) for row in rows] == [(20, "ours", 6), (40, "ours", 6)]
    for row in rows:
        assert row.tokens_per_s == pytest.approx(2 * 6 / sum(row.seconds))
        assert row.over_ours == 1
    with pytest.raises(UsageError, match="do not fit"):
        measure_decode(engine, [510], 6, 2, (), None, silent)


def test_conditions_say_what_it_ran_on(engine: Engine) -> None:
    facts = look_around(engine.model.device)
    assert facts.cpu
    assert facts.threads >= 1
    assert facts.torch.startswith("2.")
    assert facts.busy_cores is None or facts.busy_cores >= 0
