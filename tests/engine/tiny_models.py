"""Tiny random checkpoints of every supported architecture and RoPE kind, made by transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class Tiny:
    """A checkpoint recipe: architecture, what differs from the common tiny shape, RoPE."""

    name: str
    family: str
    overrides: dict[str, Any]


COMMON = dict(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=1.0,
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 3.0, 4.0],
)
GEMMA = dict(  # theta is small, so that the two RoPEs differ within a tiny head
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters=dict(
        full_attention=dict(rope_type="default", rope_theta=1e5),
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
    ),
)
TINY = [
    Tiny("llama", "Llama", {}),
    Tiny(
        "llama-mha-bias", "Llama", dict(num_key_value_heads=6, attention_bias=True, mlp_bias=True)
    ),
    Tiny("llama-tied", "Llama", dict(tie_word_embeddings=True)),
    Tiny("llama-head-dim", "Llama", dict(head_dim=16)),
    Tiny(
        "llama-linear",
        "Llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    ),
    Tiny(
        "llama-dynamic",
        "Llama",
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    ),
    Tiny(
        "llama-dynamic-past",
        "Llama",
        dict(
            max_position_embeddings=64,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
        ),
    ),
    Tiny("llama-llama3", "Llama", dict(rope_parameters=LLAMA3)),
    Tiny("llama-yarn", "Llama", dict(rope_parameters=YARN)),
    Tiny(
        "llama-yarn-mscale",
        "Llama",
        dict(
            rope_parameters=YARN
            | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=16.0, truncate=False)
        ),
    ),
    Tiny("mistral", "Mistral", dict(sliding_window=None)),
    Tiny("mistral-window", "Mistral", dict(sliding_window=24)),
    Tiny("qwen2", "Qwen2", {}),
    Tiny(
        "qwen2-window",
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=20, max_window_layers=2),
    ),
    Tiny("qwen3", "Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    Tiny("qwen3-bias", "Qwen3", dict(head_dim=8, attention_bias=True)),
    Tiny("smollm3", "SmolLM3", {}),
    Tiny(
        "smollm3-window",
        "SmolLM3",
        dict(use_sliding_window=True, sliding_window=16, no_rope_layer_interval=2),
    ),
    Tiny("phi3", "Phi3", dict(original_max_position_embeddings=512)),
    Tiny(
        "phi3-partial-window",
        "Phi3",
        dict(
            original_max_position_embeddings=512,
            sliding_window=30,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        ),
    ),
    Tiny(
        "phi3-longrope-short",
        "Phi3",
        dict(original_max_position_embeddings=400, rope_parameters=dict(LONGROPE)),
    ),
    Tiny(
        "phi3-longrope-long",
        "Phi3",
        dict(original_max_position_embeddings=64, rope_parameters=dict(LONGROPE)),
    ),
    Tiny("gemma3", "Gemma3", GEMMA),
    Tiny(
        "gemma3-linear-scale",
        "Gemma3",
        GEMMA
        | dict(
            layer_types=["full_attention", *["sliding_attention"] * 3],
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=5,
            attention_bias=True,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e4, factor=4.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
]


def build(
    tiny: Tiny, path: Path, seed: int = 0, spread: float = 0.15, **save: Any
) -> transformers.PreTrainedModel:
    """Saves a float32 checkpoint of the recipe under `path`; returns the oracle. spread: of the
    weights, for the common width."""
    torch.manual_seed(seed)
    kind = "Gemma3Text" if tiny.family == "Gemma3" else tiny.family
    config = getattr(transformers, f"{kind}Config")(**(COMMON | tiny.overrides))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{tiny.family}ForCausalLM")(config).eval()
    with torch.no_grad():  # spread the logits and the attention, so that a wrong step shows
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, spread)
            elif name.endswith("bias"):
                weight.normal_(0, 0.5)
            else:  # Gemma's norms add 1 themselves
                weight.uniform_(0.5, 1.5).sub_(1 if tiny.family == "Gemma3" else 0)
    model.save_pretrained(path, **save)
    return model
