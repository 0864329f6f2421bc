"""A GGUF file becomes the same model in the Hugging Face layout, or is refused by name."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from cache_store.errors import CacheblendError, IntegrityError, UsageError
from engine.config import load_config
from engine.library.convert import convert
from engine.library.manifest import silent
from tests.engine.tiny_gguf import (
    HEAD_DIM,
    MERGES,
    SENTENCEPIECE,
    SPECIAL,
    TEMPLATE,
    TOKENS,
    write_gguf,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GEMMA = {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2}
SENTENCEPIECE_TURN_END = len(SENTENCEPIECE) + 1
TEXT = "In 2024 the 12 men\n\n  12  a  b\t7½²٣ on it’s naïve—東京 <|im_end|> <think>"


def converted(tmp_path: Path, architecture: str = "llama", **changes: object) -> Path:
    write_gguf(tmp_path / "tiny.gguf", architecture, **changes)  # type: ignore[arg-type]
    made = tmp_path / "made"
    made.mkdir()
    convert(tmp_path / "tiny.gguf", made, silent)
    return made


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_the_models_own(architecture: str, tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    keys = GEMMA if architecture == "gemma3" else {}
    weights = write_gguf(tmp_path / "tiny.gguf", architecture, tied=tied, **keys)  # type: ignore[arg-type]
    convert(tmp_path / "tiny.gguf", tmp_path, silent)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(weights)
    for name, values in weights.items():
        assert str(found[name].dtype) == "torch.bfloat16"
        np.testing.assert_array_equal(found[name].float().numpy(), values, err_msg=name)
    config = load_config(tmp_path)
    assert (config.architecture, config.tied) == (ARCHITECTURES[architecture], tied)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope.theta, config.rms_norm_eps) == (100_000.0, 1e-5)
    turns = (SENTENCEPIECE_TURN_END,) if architecture == "gemma3" else ()
    assert (config.max_positions, config.eos_ids) == (512, (2, *turns))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
def test_transformers_reads_the_same_weights_from_the_file(
    architecture: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    keys = GEMMA if architecture == "gemma3" else {}
    made = converted(tmp_path, architecture, packed=gguf.GGMLQuantizationType.Q8_0, **keys)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    theirs = load_gguf_checkpoint(
        str(tmp_path / "tiny.gguf"), return_tensors=True, model_to_load=model
    )["tensors"]
    ours = load_file(made / "model.safetensors")
    assert set(ours) <= set(theirs)
    for name, values in ours.items():
        assert torch.equal(theirs[name].to(torch.bfloat16), values), name


def test_rounding_to_bfloat16_is_to_the_nearest(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    odd = np.random.default_rng(1).normal(size=(len(TOKENS), 64)).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", tied=False)
    # The head is replaced by numbers that bfloat16 can't hold.
    reader = gguf.GGUFReader(tmp_path / "a.gguf", "r+")
    head = next(t for t in reader.tensors if t.name == "output.weight")
    head.data[:] = odd
    reader.data.flush()
    del head, reader
    convert(tmp_path / "a.gguf", tmp_path, silent)
    found = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(found, torch.from_numpy(odd).to(torch.bfloat16))


def test_digits_are_split_one_by_one_and_every_byte_survives(tmp_path: Path) -> None:
    made = converted(tmp_path)
    ours = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    bpe = tokenizers.models.BPE(
        {token: index for index, token in enumerate(TOKENS)},
        [tuple(merge.split(" ")) for merge in MERGES],  # type: ignore[misc]
    )
    true = tokenizers.Tokenizer(bpe)
    true.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    true.add_special_tokens(SPECIAL)
    true.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    encoded = ours.encode(TEXT, add_special_tokens=False)
    assert encoded.ids == true.encode(TEXT, add_special_tokens=False).ids
    assert "12" not in encoded.tokens  # though there is such a token and a merge that makes it
    assert ours.decode(encoded.ids, skip_special_tokens=False) == TEXT
    assert ours.id_to_token(1) == "<|im_start|>"
    assert ours.get_vocab_size() == len(TOKENS)


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    spec = json.loads((converted(tmp_path) / "tokenizer.json").read_text())
    special = {token["content"]: token["special"] for token in spec["added_tokens"]}
    assert special == {**dict.fromkeys(SPECIAL, True), "<think>": False}


def test_named_tokens_template_and_ends(tmp_path: Path) -> None:
    made = converted(tmp_path)
    config = json.loads((made / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False
    assert (made / "chat_template.jinja").read_text() == TEMPLATE
    generation = json.loads((made / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["bos_token_id"]) == (2, 1)


def test_bos_is_put_first_where_the_file_asks_for_it(tmp_path: Path) -> None:
    made = converted(tmp_path, add_bos=True)
    ours = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert ours.encode("the").ids == [1, *ours.encode("the", add_special_tokens=False).ids]
    assert json.loads((made / "tokenizer_config.json").read_text())["add_bos_token"] is True


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("smollm", False)])
def test_where_the_file_does_not_say_bos_is_as_usual(pre: str, adds: bool, tmp_path: Path) -> None:
    made = converted(tmp_path, pre=pre, add_bos=None)
    ours = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert (ours.encode("the").ids[0] == 1) is adds


def test_a_sentencepiece_vocabulary_keeps_text_and_has_bos(tmp_path: Path) -> None:
    from engine.tokenizer import Tokenizer

    ours = Tokenizer.load(converted(tmp_path, sentencepiece=True))
    ids = ours.encode("the thing in 東京 </s>")
    assert ours.decode(ids).strip() == "the thing in 東京 </s>"
    assert SENTENCEPIECE.index("▁the") in ids
    assert ours.adds_bos
    assert not set(ids) & {0, 1, 2}


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_every_rule_makes_a_tokenizer_that_keeps_text(pre: str, tmp_path: Path) -> None:
    ours = tokenizers.Tokenizer.from_file(str(converted(tmp_path, pre=pre) / "tokenizer.json"))
    ids = ours.encode("Hello 2024, it’s on 東京\n\n x", add_special_tokens=False).ids
    assert ours.decode(ids) == "Hello 2024, it’s on 東京\n\n x"


def test_an_unknown_splitting_rule_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'made-up'"):
        converted(tmp_path, pre="made-up")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="'mamba' is not supported"):
        convert(tmp_path / "a.gguf", tmp_path, silent)


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="experts"):
        converted(tmp_path, expert_count=8)


def test_a_tensor_that_belongs_to_no_such_model_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(UsageError, match=r"blk\.0\.ssm_in\.weight"):
        converted(tmp_path, tensors=extra)


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    config = load_config(converted(tmp_path, attention__sliding_window=128))
    assert config.architecture == "MistralForCausalLM"
    assert set(config.windows) == {128}


def test_linear_and_yarn_scaling_are_kept(tmp_path: Path) -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    made = converted(tmp_path, "qwen2", **keys, rope__scaling__original_context_length=128)
    rope = load_config(made).rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 128)


def test_gemma_gives_the_logits_that_transformers_gets_from_what_is_written(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.forward import forward
    from engine.model import Decoder

    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    made = converted(tmp_path, "gemma3", **GEMMA, **keys)
    oracle = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    assert type(oracle).__name__ == "Gemma3ForCausalLM"
    assert oracle.config.layer_types == ["sliding_attention", "full_attention"]
    rope = oracle.config.rope_parameters
    assert rope["full_attention"]["factor"] == 2.0
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (
        (100_000.0, 10_000.0)
    )
    model, ids = Decoder.load(made, "cpu", "fp32"), list(range(3, 43))
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
        cache = model.new_cache(len(ids))
        got = forward(model, cache, ids, model.rope.tables(len(ids)), last=None)
    assert (got - expected).abs().max() <= 1e-4


def test_gemmas_layers_are_five_local_ones_to_a_global_one(tmp_path: Path) -> None:
    window = {"attention__sliding_window": 8, "block_count": 2}
    made = converted(tmp_path, "gemma3", **window)
    assert load_config(made).windows == (8, 8)
    raw = json.loads((made / "config.json").read_text())
    assert raw["layer_types"] == ["sliding_attention"] * 2
    folder = tmp_path / "capped"
    folder.mkdir()
    capped = converted(folder, "gemma3", final_logit_softcapping=30.0, **window)
    with pytest.raises(UsageError, match="final_logit_softcapping"):
        load_config(capped)


def test_gemmas_text_never_yields_its_turns(tmp_path: Path) -> None:
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(converted(tmp_path, "gemma3", **GEMMA))
    turn = SENTENCEPIECE_TURN_END
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.prepends_space) == (1, True, False)
    assert {turn, turn - 1} <= tokenizer.special_ids
    assert tokenizer.encode_template("the<end_of_turn>")[-1] == turn
    text = "the  <end_of_turn>in<start_of_turn>\nébc"
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == text
    assert [SENTENCEPIECE[i] for i in tokenizer.encode(" the")] == ["▁the"]
    assert [SENTENCEPIECE[i] for i in tokenizer.encode("é")] == ["<0xC3>", "<0xA9>"]


def llama3_divisors(factor: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """As Llama 3.1 defines them, written out case by case."""
    divisors = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi / 100000.0 ** (-2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_from_its_divisors(factor: float, tmp_path: Path) -> None:
    made = converted(tmp_path, tensors={"rope_freqs.weight": llama3_divisors(factor)})
    rope = load_config(made).rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("llama3", factor, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(8.0)
    divisors[3] *= 1.01
    with pytest.raises(UsageError, match="frequencies"):
        converted(tmp_path, tensors={"rope_freqs.weight": divisors})


def test_longrope_factors_become_the_configs(tmp_path: Path) -> None:
    long, short = np.linspace(1, 3, 8).astype(np.float32), np.linspace(1, 1.5, 8).astype(np.float32)
    made = converted(
        tmp_path,
        "phi3",
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
        rope__scaling__original_context_length=128,
    )
    rope = load_config(made).rope
    assert rope.type == "longrope"
    assert rope.original_max_positions == 128
    np.testing.assert_array_equal(np.array(rope.long_factor, np.float32), long)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, just text" * 9])
def test_what_is_no_gguf_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"bad\.gguf is not a GGUF file"):
        convert(tmp_path / "bad.gguf", tmp_path, silent)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.99])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(IntegrityError, match=r"cut\.gguf is not a GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path, silent)


def test_a_damaged_length_is_refused_not_believed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    data[24:32] = struct.pack("<Q", 2**60)  # the length of the first key
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(CacheblendError):
        convert(tmp_path / "a.gguf", tmp_path, silent)
