"""Tiny GGUF files, written as llama.cpp's converter writes them, with the weights they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
USER_DEFINED = ["<think>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "1 2", "Ġ Ġ", "Ġ a", "o n"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2

_PERMUTED = ("llama", "smollm3")


def byte_letters() -> list[str]:
    """The letters byte-level BPE writes bytes with, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


TOKENS = [*SPECIAL, *USER_DEFINED, *byte_letters(), *("".join(m.split(" ")) for m in MERGES)]

_PIECES = ["▁t", "he", "▁the", "in", "▁", *"abcdefghinoprstuvwxyz"]
SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *_PIECES]
TURNS = ["<start_of_turn>", "<end_of_turn>"]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    pre: str = "smollm",
    add_bos: bool | None = False,
    sentencepiece: bool = False,
    tied: bool = True,
    packed: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    **keys: Any,
) -> Weights:
    """Write a model and return its weights by Hugging Face name; bfloat16 holds them exactly.

    `tensors` are written besides; `keys`, their dots spelt `__`, replace or add metadata of the
    architecture.
    """
    sentencepiece = sentencepiece or architecture == "gemma3"
    pieces = [*SENTENCEPIECE, *TURNS] if architecture == "gemma3" else SENTENCEPIECE
    tokens = pieces if sentencepiece else TOKENS
    weights = _weights(architecture, tied, len(tokens))
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HEAD_DIM,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    for key, value in numbers.items():
        add = {str: writer.add_string, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        add(f"{architecture}.{key}", value)
    if "attention.key_length" not in numbers:
        writer.add_uint32(f"{architecture}.attention.key_length", HEAD_DIM)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 100000.0)
    writer.add_license("apache-2.0")
    if sentencepiece:
        _add_sentencepiece(writer, pieces)
    else:
        _add_tokenizer(writer, pre, add_bos)
    for name, array in weights.items():
        ours, values = _gguf_name(name, architecture), array
        part = name.rpartition("self_attn.")[2].split("_")[0]
        if architecture in _PERMUTED and part in ("q", "k") and "_norm" not in name:
            values = _interleaved(array, HEADS if part == "q" else KV_HEADS)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = array + 1  # which the model's own code adds
        kind = packed if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(ours, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_sentencepiece(writer: gguf.GGUFWriter, pieces: list[str]) -> None:
    """A file of the older kind: scores in place of merges, no word on BOS."""
    writer.add_tokenizer_model("llama")
    controls = len(pieces) - len(SENTENCEPIECE)
    writer.add_token_list(pieces)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(_PIECES) + [3] * controls)
    scores = [-float(rank) for rank in range(len(_PIECES))]
    writer.add_token_scores([0.0] * 259 + scores + [-1000.0] * controls)
    if controls:
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str, add_bos: bool | None) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [3] * len(SPECIAL) + [4] * len(USER_DEFINED)
    writer.add_token_types(kinds + [1] * (len(TOKENS) - len(kinds)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)


def _weights(architecture: str, tied: bool, vocab: int) -> Weights:
    made = np.random.default_rng(7)

    def random(*shape: int) -> NDArray[np.float32]:
        exact = made.normal(0, 0.1, shape).astype(np.float32)
        return (exact.view(np.uint32) & 0xFFFF0000).view(np.float32)  # what bfloat16 can hold

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": random(vocab, HIDDEN),
        "model.norm.weight": random(HIDDEN),
    }
    if not tied:
        weights["lm_head.weight"] = random(vocab, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": random(HIDDEN),
            f"{at}.post_attention_layernorm.weight": random(HIDDEN),
            f"{at}.self_attn.o_proj.weight": random(HIDDEN, q),
            f"{at}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
        if architecture == "phi3":
            weights[f"{at}.self_attn.qkv_proj.weight"] = random(q + 2 * kv, HIDDEN)
            weights[f"{at}.mlp.gate_up_proj.weight"] = random(2 * INNER, HIDDEN)
            continue
        weights |= {
            f"{at}.self_attn.q_proj.weight": random(q, HIDDEN),
            f"{at}.self_attn.k_proj.weight": random(kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": random(kv, HIDDEN),
            f"{at}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": random(INNER, HIDDEN),
        }
        if architecture == "qwen2":
            weights[f"{at}.self_attn.q_proj.bias"] = random(q)
            weights[f"{at}.self_attn.k_proj.bias"] = random(kv)
            weights[f"{at}.self_attn.v_proj.bias"] = random(kv)
        if architecture == "gemma3":
            weights[f"{at}.pre_feedforward_layernorm.weight"] = random(HIDDEN)
            weights[f"{at}.post_feedforward_layernorm.weight"] = random(HIDDEN)
        if architecture in ("qwen3", "gemma3"):
            weights[f"{at}.self_attn.q_norm.weight"] = random(HEAD_DIM)
            weights[f"{at}.self_attn.k_norm.weight"] = random(HEAD_DIM)
    return weights


def _gguf_name(name: str, architecture: str) -> str:
    kind = gguf.MODEL_ARCH[architecture.upper()]
    stem, _, suffix = name.rpartition(".")
    found = gguf.get_tensor_name_map(kind, LAYERS).get_name(stem)
    assert found is not None, name
    return f"{found}.{suffix}"


def _interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    shape = rows.shape
    halves = rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))
