"""Predicted sizes and times: the arithmetic, with rates that are made up."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from cache_store.store import ChunkStore
from engine import bound
from engine.config import ModelConfig, parse_config
from engine.diskprobe import DiskRates
from engine.estimate import (
    blend,
    decode_rate,
    full_prefill,
    ingest_seconds,
    kv_sizes,
    rate_at,
    shape_spec,
    stored_bytes,
    times,
)
from engine.probe import Probe, Rate, layer_flops
from engine.trial import PromptShape, Trial, first_layers

MISTRAL = parse_config(
    {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }
)
SHAPE = PromptShape(prefix=32, chunks=8, chunk_tokens=505, separator=0, suffix=24)
RATE = 1e12


def even(config: ModelConfig, **other: object) -> Probe:
    """A machine that does every operation at one rate, and everything else at once."""
    probe = Probe(
        device="cpu",
        dtype="bf16",
        kv_dtype="bf16",
        threads=1,
        tokens=SHAPE.tokens,
        linear=(Rate(1, RATE), Rate(1000, RATE)),
        scattered=(Rate(1, RATE), Rate(1000, RATE)),
        causal=Rate(SHAPE.tokens, RATE),
        plan_s=0.0,
        head_s=2 * config.hidden * config.vocab / RATE,
        place_bytes_s=float("inf"),
        weight_bytes_s=RATE,
        disk=DiskRates("/", write=1e30, cold=1e30, warm=1e30),
        shape=SHAPE,
        trials=(),
        notes=(),
        seconds=0.0,
    )
    return replace(probe, **other)  # type: ignore[arg-type]


def test_a_chunk_of_mistral_7b_takes_67_mb() -> None:
    sizes = kv_sizes(shape_spec(MISTRAL, "bf16"), 512, 32)
    assert sizes.chunk == 32 * 2 * 512 * 8 * 128 * 2 == 67_108_864
    assert sizes.token == 131_072
    assert sizes.chunk < sizes.entry < 1.001 * sizes.chunk
    assert kv_sizes(shape_spec(MISTRAL, "fp32"), 512, 32).chunk == 2 * sizes.chunk


def test_the_bytes_are_those_the_store_itself_predicts(tmp_path: Path) -> None:
    spec = shape_spec(MISTRAL, "bf16")
    with ChunkStore.open(tmp_path / "store", limit_bytes=10**8) as store:
        chunks = [store.predicted_bytes(spec, tokens, 9) for tokens in (100, 7)]
        assert stored_bytes(spec, (100, 7), 9) == sum(chunks) + store.predicted_bytes(spec, 9)
    assert stored_bytes(spec, (), 9) == 0  # nothing is stored, not even the prefix


def test_a_layers_operations_are_its_matrices() -> None:
    width, kv = 4096, 1024
    weights = 4096 * (2 * width + 2 * kv) + 3 * 4096 * 14336
    assert layer_flops(MISTRAL) == 2 * weights


def test_times_at_one_rate_are_the_operations_over_it() -> None:
    probe = even(MISTRAL)
    full = bound.full_prefill(MISTRAL, SHAPE.tokens)
    assert full_prefill(MISTRAL, probe, SHAPE).ttft_s == pytest.approx(full.total / RATE)
    for ratio in ("0.3", "0.16", "0"):
        flops = bound.predicted(
            MISTRAL,
            prefix=SHAPE.prefix,
            cached=SHAPE.cached,
            exact=SHAPE.exact,
            always=SHAPE.always,
            ratio=Decimal(ratio),
        )
        predicted = blend(MISTRAL, probe, SHAPE, ratio=Decimal(ratio))
        assert predicted.ttft_s == pytest.approx(flops.total / RATE, rel=1e-6)


def test_at_equal_rates_the_speedup_is_the_bound() -> None:
    found = times(MISTRAL, even(MISTRAL), SHAPE, (505,), ratios=(Decimal("0.16"), Decimal("0.05")))
    assert [way.name for way in found.ways] == ["full prefill", "blend 0.16", "blend 0.05", "reuse"]
    assert [way.ratio for way in found.ways] == [None, 0.16, 0.05, 0.0]
    full = bound.full_prefill(MISTRAL, SHAPE.tokens)
    part = bound.predicted(
        MISTRAL, prefix=32, cached=SHAPE.cached, exact=505, always=24, ratio=Decimal("0.05")
    )
    assert found.ways[2].speedup == pytest.approx(bound.speedup(full, part).overall, rel=1e-6)
    assert found.ways[0].speedup == 1


def test_the_questions_reading_is_counted_where_it_takes_place() -> None:
    """Where all is recomputed anyway, nobody asks: then it takes what `random` takes."""
    few_are_slow = replace(even(MISTRAL), linear=(Rate(1, RATE / 100), Rate(1000, RATE)))

    def seconds(policy: str, ratio: str) -> float:
        return blend(MISTRAL, few_are_slow, SHAPE, ratio=Decimal(ratio), policy=policy).ttft_s

    assert seconds("question", "0.05") > seconds("random", "0.05")
    assert seconds("question", "0.999999") == seconds("random", "0.999999")


def test_ratio_0_among_the_ratios_is_reuse_and_comes_once() -> None:
    found = times(MISTRAL, even(MISTRAL), SHAPE, (), ratios=(Decimal(0), Decimal("0.0")))
    assert [way.name for way in found.ways] == ["full prefill", "reuse"]
    assert found.ingest_s == 0


def test_a_policy_without_deviation_skips_the_layer_for_all_tokens() -> None:
    probe, ratio = even(MISTRAL), Decimal("0.16")
    value = blend(MISTRAL, probe, SHAPE, ratio=ratio, policy="value")
    random = blend(MISTRAL, probe, SHAPE, ratio=ratio, policy="random")
    late = blend(MISTRAL, probe, SHAPE, ratio=ratio, policy="value", check_layer=8)
    assert random.ttft_s < value.ttft_s < late.ttft_s


def test_few_tokens_go_at_the_rate_of_few_tokens() -> None:
    slow = even(MISTRAL, linear=(Rate(1, RATE / 100), Rate(24, RATE / 10), Rate(1000, RATE)))
    reuse = blend(MISTRAL, slow, SHAPE, ratio=Decimal(0)).compute_s
    assert reuse > 8 * blend(MISTRAL, even(MISTRAL), SHAPE, ratio=Decimal(0)).compute_s
    full = full_prefill(MISTRAL, slow, SHAPE).ttft_s
    assert full == pytest.approx(full_prefill(MISTRAL, even(MISTRAL), SHAPE).ttft_s, rel=0.1)


def test_between_two_counts_the_time_grows_in_a_line() -> None:
    rates = (Rate(10, 10.0), Rate(30, 15.0))  # a second, then two
    assert rate_at(rates, 20) == pytest.approx(20 / 1.5)
    assert rate_at(rates, 10) == 10
    assert rate_at(rates, 5) == 5  # no sooner than ten of them
    assert rate_at(rates, 30) == rate_at(rates, 3000) == 15
    assert rate_at(rates[:1], 40) == 10
    falling = (Rate(10, 10.0), Rate(30, 300.0))  # noise: more tokens never take less time
    assert rate_at(falling, 20) == 20


def test_what_prompts_took_besides_is_added() -> None:
    bare = even(MISTRAL)
    prompt_s, layer_s, select_s = 0.5, 0.01, 0.2

    def tried(layers: int, ratio: str) -> Trial:
        counted = blend(first_layers(MISTRAL, layers), bare, SHAPE, ratio=Decimal(ratio)).ttft_s
        extra = prompt_s + layers * layer_s + (select_s if ratio != "0" else 0)
        return Trial(layers, Decimal(ratio), counted + extra, 0.003 * layers)

    probe = even(MISTRAL, trials=(tried(2, "0"), tried(6, "0"), tried(6, "0.16")))
    for ratio, extra in (("0", 0.0), ("0.05", select_s)):
        over = blend(MISTRAL, probe, SHAPE, ratio=Decimal(ratio)).ttft_s
        over -= blend(MISTRAL, bare, SHAPE, ratio=Decimal(ratio)).ttft_s
        assert over == pytest.approx(prompt_s + 32 * layer_s + extra)
    half = replace(SHAPE, chunks=4)
    over = blend(MISTRAL, probe, half, ratio=Decimal(0)).ttft_s
    over -= blend(MISTRAL, bare, half, ratio=Decimal(0)).ttft_s
    assert over == pytest.approx(prompt_s + 32 * layer_s / 2)

    found = times(MISTRAL, probe, half, (), ratios=())
    assert found.load_warm_s == pytest.approx(0.003 * 32 / 2, rel=0.02)  # half the tokens


def test_a_slow_disk_is_waited_for_while_layers_are_computed() -> None:
    nbytes = (SHAPE.prefix + SHAPE.cached) * 131_072
    disk = DiskRates("/", cold=nbytes / 10, cold_cpu=0.1, warm=nbytes / 0.5, write=1e30)
    probe = even(MISTRAL, disk=disk)
    reuse = blend(MISTRAL, probe, SHAPE, ratio=Decimal(0))
    assert reuse.ttft_s == pytest.approx(reuse.compute_s + 0.5)
    assert reuse.ttft_cold_s == pytest.approx(10)  # computing takes less than the disk
    blended = blend(MISTRAL, probe, SHAPE, ratio=Decimal("0.9"))
    assert blended.compute_s > 10
    assert blended.ttft_cold_s == pytest.approx(blended.compute_s + 1)
    loads = times(MISTRAL, probe, SHAPE, (), ratios=())
    assert (loads.load_warm_s, loads.load_cold_s) == pytest.approx((0.5, 10))
    unknown = blend(MISTRAL, even(MISTRAL, disk=DiskRates("/")), SHAPE, ratio=Decimal(0))
    assert unknown.ttft_cold_s is None


def test_ingest_takes_as_long_as_the_slower_of_computing_and_writing() -> None:
    chunks = (512,) * 80  # ten batches
    computing = ingest_seconds(MISTRAL, even(MISTRAL), chunks, 32)
    operations = sum(
        bound.predicted(MISTRAL, prefix=32, cached=0, always=tokens).total for tokens in chunks
    )
    assert computing == pytest.approx(operations / RATE, rel=0.01)
    nbytes = 131_072 * sum(chunks)
    disk = DiskRates("/", write=nbytes / (10 * computing))
    writing = ingest_seconds(MISTRAL, even(MISTRAL, disk=disk), chunks, 32)
    assert 10 * computing < writing < 10.2 * computing


def test_an_answer_comes_slower_behind_a_longer_prompt() -> None:
    probe = even(MISTRAL)
    assert decode_rate(MISTRAL, probe, 100) > decode_rate(MISTRAL, probe, 10_000)


def test_a_shorter_shape_keeps_its_number_of_chunks() -> None:
    short = SHAPE.within(1000)
    assert (short.chunks, short.prefix, short.suffix) == (8, 32, 24)
    assert 990 < short.tokens <= 1000
    assert SHAPE.within(10**6) == SHAPE
    assert SHAPE.within(1).chunk_tokens == 1
    separated = replace(SHAPE, separator=3)
    assert separated.always == 24 + 7 * 3
    assert separated.tokens == SHAPE.tokens + 7 * 3
