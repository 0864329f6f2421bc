"""What a GGUF file says of its model, in the words of a Hugging Face `config.json`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.errors import IntegrityError, UsageError


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face one.

    `permuted`: its Q and K rows are stored pairwise interleaved, as llama.cpp's "norm" RoPE wants
    them, and must be put back in halves. `extra`: what `config.json` says that the file leaves out.
    `centred`: its norms are stored with the 1 added that the Hugging Face model adds itself.
    """

    name: str
    model_type: str
    permuted: bool
    extra: Mapping[str, Any]
    centred: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", True, {"mlp_bias": False}),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", False, {"use_sliding_window": False}),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", "qwen3", False, {"use_sliding_window": False, "attention_bias": False}
    ),
    "smollm3": Architecture(
        # Every fourth layer has no RoPE; llama.cpp knows that of the architecture, as do we.
        "SmolLM3ForCausalLM",
        "smollm3",
        True,
        {"no_rope_layer_interval": 4, "use_sliding_window": False, "attention_bias": False},
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", False, {}),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", False, {"attention_bias": False}, centred=True
    ),
}


class Metadata:
    """The key-value part of a GGUF file. `key` reads `<architecture>.<name>`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def key(self, name: str, default: Any = None) -> Any:
        return self._values.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.key(name)
        if value is None:
            raise IntegrityError(f"{self._where}: no {self.architecture}.{name} in it")
        return value


def architecture_of(metadata: Metadata, where: str) -> Architecture:
    """Raises UsageError for an architecture that can't be converted."""
    found = ARCHITECTURES.get(metadata.architecture)
    experts = metadata.key("expert_count", 0)
    if found is None or experts:
        name = f"{metadata.architecture} with experts" if experts else metadata.architecture
        raise UsageError(
            f"{where}: GGUF architecture {name!r} is not supported",
            f"supported are {', '.join(ARCHITECTURES)}",
        )
    return found


def config_of(
    metadata: Metadata,
    where: str,
    shapes: Mapping[str, Sequence[int]],
    factors: Callable[[str], Sequence[float] | None],
) -> dict[str, Any]:
    """The `config.json` of the model.

    `shapes`: the tensors' shapes by GGUF name, outermost dimension first; `factors` returns a
    small tensor by name as numbers, None where there is none.
    """
    architecture = architecture_of(metadata, where)
    heads = int(metadata.need("attention.head_count"))
    hidden = int(metadata.need("embedding_length"))
    head_dim = int(metadata.key("attention.key_length", hidden // heads))
    rotary = int(metadata.key("rope.dimension_count", head_dim))
    window = metadata.key("attention.sliding_window")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": int(shapes["token_embd.weight"][0]),
        "hidden_size": hidden,
        "intermediate_size": int(metadata.need("feed_forward_length")),
        "num_hidden_layers": int(metadata.need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.key("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.need("context_length")),
        "rms_norm_eps": shortest(metadata.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(metadata.key("rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(metadata, where, rotary, factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the older name of the same
        **architecture.extra,
    }
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        if window:  # a GGUF calls a Mistral model llama; only its window tells
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    if window and architecture.name in ("LlamaForCausalLM", "Phi3ForCausalLM"):
        config["sliding_window"] = int(window)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    if architecture.name == "Gemma3ForCausalLM":
        del config["hidden_act"]
        config |= _gemma3(metadata, config)
    original = metadata.key("rope.scaling.original_context_length")
    if original and architecture.name == "Phi3ForCausalLM":
        config["original_max_position_embeddings"] = int(original)
    return config


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 models, and what their files say besides."""
    layers = config["num_hidden_layers"]
    window = metadata.need("attention.sliding_window")
    every = metadata.key("attention.sliding_window_pattern", 6)
    if isinstance(every, int):
        sliding = [bool((layer + 1) % every) for layer in range(layers)]
    else:
        sliding = [bool(flag) for flag in every]
    # Only the largest model scales scores by another width than a head's.
    largest = layers == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": int(window),
        "layer_types": ["sliding_attention" if own else "full_attention" for own in sliding],
        "rope_theta": shortest(metadata.key("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": shortest(metadata.key("rope.freq_base_swa", 10_000.0)),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"]
            if largest
            else config["head_dim"]
        ),
        "attn_logit_softcapping": metadata.key("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.key("final_logit_softcapping"),
        "use_bidirectional_attention": False,
    }


def shortest(value: float) -> float:
    """The shortest decimal that is the same in 32 bits: a file's 9.9999997e-06 is 1e-05."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return float(value)


def _rope_scaling(
    metadata: Metadata,
    where: str,
    rotary: int,
    factors: Callable[[str], Sequence[float] | None],
) -> dict[str, Any] | None:
    long, short = factors("rope_factors_long.weight"), factors("rope_factors_short.weight")
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "type": "longrope",
            "long_factor": [shortest(x) for x in long],
            "short_factor": [shortest(x) for x in short],
        }
    frequencies = factors("rope_freqs.weight")
    if frequencies is not None and any(x != 1 for x in frequencies):
        return _llama3(frequencies, rotary, float(metadata.key("rope.freq_base", 1e4)), where)
    kind = metadata.key("rope.scaling.type", "none")
    factor = shortest(float(metadata.key("rope.scaling.factor", 1.0)))
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    original = metadata.key("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(original),
        }
    raise UsageError(f"{where}: RoPE scaling {kind!r} is not supported")


def _llama3(frequencies: Sequence[float], rotary: int, theta: float, where: str) -> dict[str, Any]:
    """Llama 3's scaling, of which the file has only the result: one divisor per frequency.

    All Llama 3.1 to 3.3 models share three of its four numbers and the fourth is the greatest
    divisor. The divisors they give are compared with the file's, so nothing is guessed.
    """
    factor, low, high, original = shortest(max(frequencies)), 1.0, 4.0, 8192
    expected = []
    for pair in range(rotary // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / rotary)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(frequencies) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(frequencies, expected, strict=True)
    ):
        raise UsageError(
            f"{where}: its RoPE frequencies are scaled in a way that is not known",
            "get the model in the Hugging Face layout instead",
        )
    return {
        "rope_type": "llama3",
        "type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
