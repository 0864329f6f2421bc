"""A GGUF file made into a folder in the Hugging Face layout, weights in bfloat16.

The only module that imports gguf and transformers. Weights are unpacked and written one tensor at
a time, so that memory holds no second copy of the model.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_store.errors import IntegrityError, UsageError
from engine.library.gguf_config import Architecture, Metadata, architecture_of, config_of
from engine.library.gguf_tokenizer import dumped, tokenizer_config, tokenizer_json
from engine.library.manifest import Progress

if TYPE_CHECKING:
    import numpy as np

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors that say how to rotate; they go into config.json.
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Conversion:
    """What was learnt while converting: the file's licence and the versions of what did it."""

    licence: str
    versions: Mapping[str, str]


def convert(gguf_file: Path, into: Path, progress: Progress) -> Conversion:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json and, if the file has one, chat_template.jinja into the folder `into`.

    Raises UsageError for a model or tokenizer that can't be converted, IntegrityError for a file
    that isn't GGUF or contradicts itself.
    """
    where = str(gguf_file)
    reader = _open(gguf_file)
    metadata = Metadata({name: f.contents() for name, f in reader.fields.items()}, where)
    architecture = architecture_of(metadata, where)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise IntegrityError(f"{where}: it has no token embeddings, so it is not a whole model")
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}

    def factors(name: str) -> Sequence[float] | None:
        return [float(x) for x in tensors[name].data] if name in tensors else None

    config = config_of(metadata, where, shapes, factors)
    (into / "config.json").write_text(dumped(config), encoding="utf-8")
    (into / "generation_config.json").write_text(
        dumped(_generation_config(metadata)), encoding="utf-8"
    )
    _write_tokenizer(gguf_file, metadata, into, config, where)
    names = _hf_names(list(tensors), architecture, where)
    order = sorted(names, key=lambda name: (_layer(name), name))
    _write_safetensors(
        into / "model.safetensors",
        [(names[name], shapes[name]) for name in order],
        (_bf16(tensors[name], config, architecture, where) for name in order),
        progress,
    )
    versions = {package: version(package) for package in ("gguf", "tokenizers", "transformers")}
    return Conversion(str(metadata.get("general.license", "")), versions)


def _open(gguf_file: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as error:
        raise IntegrityError(
            f"{gguf_file} is not a GGUF file that can be read ({error})", "get the file again"
        ) from None


def _hf_names(names: Sequence[str], architecture: Architecture, where: str) -> dict[str, str]:
    """GGUF name to Hugging Face name. Raises UsageError for a tensor nobody knows."""
    found = {}
    blocks = _BLOCK | _GEMMA3 if architecture.centred else _BLOCK
    for name in names:
        if name in _ROPE:
            continue
        stem, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block and block[2] == "ffn_up" and architecture.model_type == "phi3":
            target = f"model.layers.{block[1]}.mlp.gate_up_proj"
        elif block and block[2] in blocks:
            target = f"model.layers.{block[1]}.{blocks[block[2]]}"
        elif stem in _TOP:
            target = _TOP[stem]
        else:
            raise UsageError(f"{where}: tensor {name!r} is not part of a {architecture.name}")
        found[name] = f"{target}.{kind}"
    return found


def _layer(name: str) -> int:
    block = re.match(r"blk\.(\d+)\.", name)
    return int(block[1]) if block else -1


def _bf16(
    tensor: Any, config: Mapping[str, Any], architecture: Architecture, where: str
) -> np.ndarray[Any, Any]:
    """The tensor in bfloat16, as bytes: rounded to the nearest, ties to even."""
    import gguf
    import numpy as np

    try:
        full = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError:
        raise UsageError(
            f"{where}: {tensor.name} is packed as {tensor.tensor_type.name}, which is unsupported",
            "use another quantisation of the model, Q8_0 for instance",
        ) from None
    part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", tensor.name)
    if part and architecture.permuted:
        key = "num_attention_heads" if part[1] == "q" else "num_key_value_heads"
        full = _in_halves(full, int(config[key]))
    if architecture.centred and tensor.name.endswith("norm.weight"):
        full = full - 1
    packed = gguf.quants.quantize(full, gguf.GGMLQuantizationType.BF16)
    return np.ascontiguousarray(packed).view(np.uint8)


def _in_halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's interleaving: rows x0 y0 x1 y1 … of each head become x0 x1 … y0 y1 …"""
    import numpy as np

    shape = rows.shape
    pairs = rows.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(shape))


def _write_safetensors(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    data: Iterator[np.ndarray[Any, Any]],
    progress: Progress,
) -> None:
    """Write tensors in order, as their bytes come; the header is known from names and shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + 2 * _product(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for values in data:
            file.write(values.data)
            done += values.nbytes
            progress("converting", done, end)
    if done != end:
        raise IntegrityError(f"{path.name}: {done} bytes of weights instead of {end}")


def _product(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """What ends an answer: the end of text, and the end of a turn where that is another token."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if metadata.architecture == "gemma3":  # its files mostly don't name it
        tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
        ends += [tokens.index(token) for token in ("<end_of_turn>",) if token in tokens]
    unique = list(dict.fromkeys(int(index) for index in ends if index is not None))
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique,
        "pad_token_id": pad,
    }


def _write_tokenizer(
    gguf_file: Path, metadata: Metadata, into: Path, config: Mapping[str, Any], where: str
) -> None:
    kind = metadata.get("tokenizer.ggml.model")
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    if len(tokens) > int(config["vocab_size"]):
        raise IntegrityError(f"{where}: {len(tokens)} tokens, {config['vocab_size']} embeddings")
    if kind == "gpt2":
        text = dumped(tokenizer_json(metadata, where))
        (into / "tokenizer.json").write_text(text, encoding="utf-8")
    elif kind == "llama":
        _write_sentencepiece(gguf_file, into, where)
    else:
        raise UsageError(f"{where}: tokenizer {kind!r} is not supported", "gpt2 and llama are")
    context = int(config["max_position_embeddings"])
    named = dumped(tokenizer_config(metadata, tokens, context))
    (into / "tokenizer_config.json").write_text(named, encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (into / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    _try_tokenizer(into / "tokenizer.json", where)


def _write_sentencepiece(gguf_file: Path, into: Path, where: str) -> None:
    """transformers rebuilds a sentencepiece tokenizer, merges included, from its scores."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UsageError(
            f"{where}: its tokenizer can't be converted ({str(error).splitlines()[0]})",
            "get the model in the Hugging Face layout instead",
        ) from None
    tokenizer.backend_tokenizer.save(str(into / "tokenizer.json"))


def _try_tokenizer(path: Path, where: str) -> None:
    """Load what was written and send a text there and back. Raises IntegrityError."""
    from tokenizers import Tokenizer

    text = "In 2024, they said: “naïve” 12345 — 東京\n\n  done."
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise IntegrityError(f"{where}: its tokenizer is not usable ({error})") from None
    back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
    if back.strip() != text:
        raise IntegrityError(f"{where}: its tokenizer does not give text back as it was")
