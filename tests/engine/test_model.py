"""The decoder against transformers: every architecture, every RoPE kind, float32."""

import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import torch

from cache_store.errors import IntegrityError, NotFoundError, UsageError
from engine.config import ModelConfig, load_config, parse_config
from engine.fingerprint import computed_facts
from engine.forward import forward
from engine.model import Decoder, choose_device, choose_dtype
from tests.engine.tiny_models import COMMON, TINY, Tiny, build

TOKENS = 120


def prefill_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    cache = model.new_cache(len(ids))
    return forward(model, cache, ids, model.rope.tables(len(ids)), last=None)


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_prefill_equals_transformers(tiny: Tiny, tmp_path: Path) -> None:
    oracle = build(tiny, tmp_path)
    model = Decoder.load(tmp_path, "cpu", "fp32")
    ids = torch.randint(3, 300, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    got = prefill_logits(model, ids)
    assert expected.std() > 0.3  # the comparison means something
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_parts_equal_the_whole(tiny: Tiny, tmp_path: Path) -> None:
    """Prefill in pieces, then token by token, is the same as at once."""
    build(tiny, tmp_path)
    model = Decoder.load(tmp_path, "cpu", "fp32")
    ids = torch.randint(3, 300, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = prefill_logits(model, ids)
    cache, tables = model.new_cache(TOKENS), model.rope.tables(TOKENS)
    parts = [forward(model, cache, ids[:50], tables, last=None)]
    parts.append(forward(model, cache, ids[50:110], tables, last=None))
    parts += [forward(model, cache, [token], tables) for token in ids[110:]]
    assert (torch.cat(parts) - expected).abs().max() <= 1e-4


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    tiny = TINY[0]
    build(tiny, tmp_path / "one")
    build(tiny, tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    ids = list(range(3, 60))
    one = prefill_logits(Decoder.load(tmp_path / "one", "cpu", "fp32"), ids)
    many = prefill_logits(Decoder.load(tmp_path / "many", "cpu", "fp32"), ids)
    assert torch.equal(one, many)


def test_last_logits_need_no_others(tmp_path: Path) -> None:
    build(TINY[0], tmp_path)
    model = Decoder.load(tmp_path, "cpu", "fp32")
    ids = list(range(3, 80))
    everything = prefill_logits(model, ids)
    cache = model.new_cache(len(ids))
    last = forward(model, cache, ids, model.rope.tables(len(ids)))
    assert last.shape == (1, 300)
    assert (last[0] - everything[-1]).abs().max() <= 1e-5


def test_attention_never_sees_a_later_token(tmp_path: Path) -> None:
    build(TINY[0], tmp_path)
    model = Decoder.load(tmp_path, "cpu", "fp32")
    ids = list(range(3, 80))
    changed = [*ids[:40], *reversed(ids[40:])]
    assert torch.equal(prefill_logits(model, ids)[:40], prefill_logits(model, changed)[:40])


@pytest.mark.model
@pytest.mark.parametrize("which", ["default_model_dir", "gemma_model_dir"])
def test_real_models_equal_transformers(which: str, request: pytest.FixtureRequest) -> None:
    import transformers

    model_dir = request.getfixturevalue(which)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32
    ).eval()
    model = Decoder.load(model_dir, "cpu", "fp32")
    ids = torch.randint(20, 49000, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (prefill_logits(model, ids) - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert (prefill_logits(model, ids) - expected).abs().max() <= 1e-3


def config(**changes: object) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], **COMMON, **changes}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        ({"architectures": []}, "unknown"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0}, "not between 0 and 1"),
        ({"partial_rotary_factor": 1.5}, "not between 0 and 1"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"torch_dtype": "int8"}, "int8"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_config(config(**changes))


def test_unsupported_architecture_lists_what_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(config(architectures=["GPT2LMHeadModel"]))
    assert "LlamaForCausalLM" in caught.value.hint
    assert "longrope" in caught.value.hint


def test_older_spelling_of_rope_is_read() -> None:
    parsed = parse_config(config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}))
    assert (parsed.rope.type, parsed.rope.theta, parsed.rope.factor) == ("linear", 5e5, 2.0)
    assert parsed.context == 1024


def gemma(**changes: object) -> dict[str, object]:
    shape = {"sliding_window": 512, "num_hidden_layers": 7, **changes}
    return config(architectures=["Gemma3ForCausalLM"], **shape)


def test_gemmas_older_spelling_is_read() -> None:
    parsed = parse_config(
        gemma(
            rope_theta=5e5,
            rope_local_base_freq=2e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window_pattern=3,
            head_dim=64,
            query_pre_attn_scalar=168,
        )
    )
    assert parsed.windows == (512, 512, None, 512, 512, None, 512)
    assert (parsed.rope.type, parsed.rope.theta, parsed.rope.factor) == ("linear", 5e5, 8.0)
    assert parsed.local_rope is not None
    assert (parsed.local_rope.type, parsed.local_rope.theta) == ("default", 2e4)
    assert parsed.context == COMMON["max_position_embeddings"]  # the factor is in it
    assert parsed.attention_scale == 168**-0.5
    assert parsed.embed_scale == COMMON["hidden_size"] ** 0.5


def test_what_gemma_leaves_out_is_as_in_transformers() -> None:
    from transformers import Gemma3TextConfig

    theirs = Gemma3TextConfig()
    ours = parse_config(
        {"architectures": ["Gemma3ForCausalLM"]}
        | {key: getattr(theirs, key) for key in COMMON if key.startswith(("num_h", "num_a"))}
        | {key: getattr(theirs, key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
        | {"max_position_embeddings": 1024}
    )
    kinds = ["full_attention" if w is None else "sliding_attention" for w in ours.windows]
    assert kinds == theirs.layer_types
    assert ours.windows[0] == theirs.sliding_window
    assert ours.local_rope is not None
    assert ours.rope.theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert ours.local_rope.theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.tied, ours.activation) == (True, theirs.hidden_activation)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"layer_types": ["chunked_attention"] * 7}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "per kind of layer"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2}}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        ({"hidden_activation": "relu"}, "relu"),
    ],
)
def test_gemmas_that_cannot_be_computed_are_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_config(gemma(**changes))


def test_fields_of_later_models_leave_older_fingerprints_alone() -> None:
    facts = computed_facts(parse_config(config()))
    later = {field.name for field in fields(ModelConfig) if field.default is not MISSING}
    assert "local_rope" in later
    assert not later & set(facts)
    assert {"local_rope", "four_norms"} <= set(computed_facts(parse_config(gemma())))


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load_config(tmp_path)
    build(TINY[0], tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match="safetensors"):
        Decoder.load(tmp_path, "cpu", "fp32")
    weights.unlink()
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        Decoder.load(tmp_path, "cpu", "fp32")
    weights.write_bytes(whole)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": 100}))
    with pytest.raises(IntegrityError, match=r"gate_proj.*shape"):
        Decoder.load(tmp_path, "cpu", "fp32")


def test_devices_and_dtypes_are_checked() -> None:
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    for name in ("gpu", "cuda:99", "xpu", "meta"):
        with pytest.raises(UsageError):
            choose_device(name)
    assert choose_dtype("fp32", "bf16", cpu) == "fp32"
    assert choose_dtype("auto", "fp32", cpu) == "fp32"
    assert choose_dtype("auto", "bf16", torch.device("cuda")) == "bf16"
    with pytest.raises(UsageError, match="fp8"):
        choose_dtype("fp8", "bf16", cpu)
