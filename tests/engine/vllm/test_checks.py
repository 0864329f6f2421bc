from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.blueprint import Blueprint
from engine.vllm.checks import Facts, Layer, as_computed, layers_refusal, refusal, release_of

USUAL = Facts(version="0.32.0", architecture="LlamaForCausalLM", max_length=4096)
LAYER = Layer("CPUAttentionBackendImpl", head_dim=64, scale=0.125)


def test_what_vllm_usually_does_is_taken() -> None:
    assert refusal(USUAL) is None
    for name in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"):
        assert refusal(replace(USUAL, architecture=name)) is None
    for dtype in ("bfloat16", "fp8", "fp8_e5m2"):
        assert refusal(replace(USUAL, kv_dtype=dtype)) is None
    assert refusal(replace(USUAL, rope="yarn", layout=("FullAttentionSpec",))) is None
    assert refusal(replace(USUAL, windows=(4096, None))) is None  # as far as prompts go anyway


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pipeline": 2}, "pipeline parallel"),
        ({"prefill_context": 2}, "prefill context parallel"),
        ({"decode_context": 2}, "decode context parallel"),
        ({"mla": True}, "MLA"),
        ({"hybrid": True}, "other layers than attention"),
        ({"windows": (None, 1024)}, "sliding window of 1024 tokens"),
        ({"layout": ("FullAttentionSpec", "SlidingWindowSpec")}, "SlidingWindowSpec"),
        ({"layout": ("SlidingWindowSpec",)}, "SlidingWindowSpec"),
        ({"lora": True}, "LoRA"),
        ({"multimodal": True}, "multimodal"),
        ({"encoder_decoder": True}, "encoder-decoder"),
        ({"speculation": "eagle"}, "speculative decoding (eagle)"),
        ({"rope": "dynamic"}, "RoPE of type dynamic"),
        ({"rope": "longrope"}, "RoPE of type longrope"),
        ({"kv_dtype": "nvfp4"}, "KV cache of type nvfp4"),
        ({"architecture": "SmolLM3ForCausalLM"}, "not with SmolLM3ForCausalLM"),
        ({"own_layers": False}, "through the transformers library"),
        ({"runner": "pooling"}, "not one for pooling"),
        ({"role": "kv_consumer"}, "kv_role kv_both"),
        ({"overrides": ("rope_theta",)}, "rope_theta"),
        ({"load_format": "dummy"}, "random weights"),
        ({"version": "0.31.4"}, "0.31.4"),
        ({"version": "0.33.0"}, "0.33.0"),
        ({"version": "dev"}, "dev"),
    ],
)
def test_what_blending_cannot_be_used_with_is_said_in_one_line(
    changed: dict[str, object], said: str
) -> None:
    line = refusal(replace(USUAL, **changed))  # type: ignore[arg-type]
    assert said in (line or "")
    assert "\n" not in (line or "")


def test_other_versions_can_be_tried() -> None:
    other = replace(USUAL, version="0.34.1")
    assert "any_version" in (refusal(other) or "")
    assert refusal(other, any_version=True) is None
    assert refusal(replace(other, lora=True), any_version=True) is not None


def test_local_builds_of_a_version_are_that_version() -> None:
    assert release_of("0.32.0+cpu") == release_of("0.32.1.dev3") == (0, 32)
    assert refusal(replace(USUAL, version="0.32.0+cpu")) is None


def test_attention_as_the_engine_computes_it_is_taken() -> None:
    assert layers_refusal({"a": LAYER, "b": LAYER}, 2) is None
    assert layers_refusal({"a": replace(LAYER, head_dim=80, scale=80**-0.5)}, 1) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"takes_kv": False, "backend": "XImpl"}, "(XImpl) cannot be given KV"),
        ({"decodes": False}, "not causal"),
        ({"alibi": True}, "ALiBi"),
        ({"soft_cap": 50.0}, "capped at 50"),
        ({"sinks": True}, "sinks"),
        ({"window": 4096}, "sliding window of 4096 tokens"),
        ({"shares_kv": True}, "another layer's KV"),
        ({"scale": 0.1}, "by 0.1, not by 0.125"),
    ],
)
def test_attention_of_another_kind_is_refused_by_name(
    changed: dict[str, object], said: str
) -> None:
    layers = {"layers.0": LAYER, "layers.1": replace(LAYER, **changed)}  # type: ignore[arg-type]
    line = layers_refusal(layers, 2)
    assert said in (line or "")
    assert "layers.1" in (line or "")


def test_layers_that_are_missing_are_noticed() -> None:
    assert "1 attention layers found, not 2" in (layers_refusal({"a": LAYER}, 2) or "")


def test_weights_that_vllm_quantises_itself_are_others(default_model_dir: Path) -> None:
    blueprint = Blueprint.open(default_model_dir, dtype="bf16")
    plain = SimpleNamespace(quantization=None, quantization_config=None)
    online = [SimpleNamespace(quantization=q, quantization_config=None) for q in ("fp8", "int8")]
    assert as_computed(blueprint, plain) is blueprint
    others = [as_computed(blueprint, config).spec.model for config in online]
    assert len({blueprint.spec.model, *others}) == 3
    stored = replace(blueprint, config=replace(blueprint.config, quantisation="{}"))
    assert as_computed(stored, online[0]) is stored  # the folder's files are what is computed with
