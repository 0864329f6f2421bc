"""What a checkpoint's `config.json` says, checked and reduced to what the decoder needs.

Everything that would compute something else than the declared model is refused here, by name,
before any weight is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.errors import NotFoundError, UsageError
from cache_store.keys import DType
from engine.rope_config import ROPE_TYPES, RopeConfig, read_ropes


@dataclass(frozen=True)
class Family:
    """What an architecture fixes that its `config.json` may leave out."""

    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    qkv_bias: bool | None = False  # None: `attention_bias` decides
    o_bias: bool | None = False
    qk_norm: bool = False
    fused: bool = False  # qkv_proj and gate_up_proj in one matrix each
    sliding_window: int | None = None  # what an absent key means
    window_flag: bool = False  # the window counts only with `use_sliding_window`
    partial_rotary: bool = False
    gemma: bool = False  # norms by 1 + weight, four a layer; local and global RoPE


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, o_bias=None),
    "MistralForCausalLM": Family(sliding_window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding_window=4096, window_flag=True),
    "Qwen3ForCausalLM": Family(
        qkv_bias=None, o_bias=None, qk_norm=True, sliding_window=4096, window_flag=True
    ),
    "SmolLM3ForCausalLM": Family(
        qkv_bias=None, o_bias=None, rope_theta=2_000_000.0, tied=True, window_flag=True
    ),
    "Phi3ForCausalLM": Family(rms_norm_eps=1e-5, fused=True, partial_rotary=True),
    "Gemma3ForCausalLM": Family(
        rope_theta=1_000_000.0,
        tied=True,
        qkv_bias=None,
        o_bias=None,
        qk_norm=True,
        sliding_window=4096,
        gemma=True,
    ),
}


_QUANTISED = ("quantize_config.json", "quant_config.json")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are in elements, positions in tokens."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    rope: RopeConfig
    rope_layers: tuple[bool, ...]  # False: a layer without RoPE
    windows: tuple[int | None, ...]  # sliding window per layer, None: attends to everything
    eos_ids: tuple[int, ...]
    dtype: DType  # the checkpoint's own
    # Fields with a default came later: see `engine.fingerprint`.
    local_rope: RopeConfig | None = None  # of layers with a sliding window, where theirs is another
    attention_scale: float | None = None  # of scores, where it isn't head_dim**-0.5
    embed_scale: float = 1.0
    centred_norms: bool = False  # a norm's weight is stored less 1
    four_norms: bool = False  # attention's and the MLP's output are normed too
    quantisation: str | None = None  # how the weights are quantised, as the checkpoint says

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens, the declared RoPE was made for."""
        if self.local_rope is not None:  # Gemma's max_positions has the factor in it
            return self.max_positions
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_positions * self.rope.factor)
        if self.rope.type == "yarn":
            return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))
        return self.max_positions


def load_config(model_dir: Path, *, quantised: bool = False) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json`, for the end-of-text ids).

    quantised: whether quantised weights are all right, which only vLLM computes with. Raises
    NotFoundError where there is no `config.json`, UsageError where the model is not one that can
    be computed here.
    """
    path = model_dir / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise NotFoundError(
            f"{model_dir}: no config.json there",
            "give a directory in the Hugging Face layout, or a name from `cacheblend models ls`",
        )
    generation = _read_json(model_dir / "generation_config.json") or {}
    for name in _QUANTISED:  # where older tools say it
        if not raw.get("quantization_config"):
            raw["quantization_config"] = _read_json(model_dir / name)
    return parse_config(raw, generation, where=str(path), quantised=quantised)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: a JSON object is expected")
    return value


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
    *,
    quantised: bool = False,
) -> ModelConfig:
    """Checks a `config.json` mapping. Raises UsageError naming what is not supported."""
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else str(raw.get("model_type", "unknown"))
    family = FAMILIES.get(name)
    if family is None:
        raise UsageError(
            f"{where}: architecture {name} is not supported",
            "supported: " + ", ".join(FAMILIES) + " (RoPE types: " + ", ".join(ROPE_TYPES) + ")",
        )
    quantisation = raw.get("quantization_config") or None
    if quantisation is not None and not quantised:
        raise UsageError(
            f"{where}: the torch engine does not compute with quantised weights",
            "use the bf16, fp16 or fp32 weights, or vLLM",
        )
    read = _Reader(raw, where)
    layers, heads = read.size("num_hidden_layers"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", 4 if family.gemma else heads)
    hidden = read.size("hidden_size")
    if raw.get("head_dim") is None and hidden % heads and not family.gemma:
        raise UsageError(f"{where}: hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = read.size("head_dim", 256 if family.gemma else hidden // heads)
    if heads % kv_heads:
        raise UsageError(f"{where}: {heads} query heads do not divide by {kv_heads} KV heads")
    activation = str(raw.get("hidden_act", "silu"))
    if family.gemma:
        activation = str(raw.get("hidden_activation") or "gelu_pytorch_tanh")
    if activation not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise UsageError(f"{where}: activation {activation!r} is not supported", "supported: silu")
    bias = bool(raw.get("attention_bias", False))
    max_positions = read.size("max_position_embeddings")
    rope, local_rope = read_ropes(
        raw,
        where,
        name,
        theta=family.rope_theta,
        partial=family.partial_rotary,
        local=family.gemma,
        head_dim=head_dim,
        max_positions=max_positions,
    )
    return ModelConfig(
        architecture=name,
        vocab=read.size("vocab_size"),
        hidden=hidden,
        intermediate=read.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=float(raw.get("rms_norm_eps", family.rms_norm_eps)),
        activation=activation,
        tied=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(raw.get("mlp_bias", False))
        and name in ("LlamaForCausalLM", "SmolLM3ForCausalLM"),
        qk_norm=family.qk_norm,
        fused=family.fused,
        rope=rope,
        rope_layers=_rope_layers(raw, name, layers, where),
        windows=_windows(raw, family, name, layers, where),
        eos_ids=_ids((generation or {}).get("eos_token_id"), raw.get("eos_token_id")),
        dtype=_dtype(raw, where),
        local_rope=local_rope,
        quantisation=None if quantisation is None else json.dumps(quantisation, sort_keys=True),
        **(_gemma(raw, read, hidden, head_dim) if family.gemma else {}),
    )


@dataclass(frozen=True)
class _Reader:
    raw: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{self.where}: {key} must be a positive whole number, not {value!r}")
        return value


def _gemma(raw: Mapping[str, Any], read: _Reader, hidden: int, head_dim: int) -> dict[str, Any]:
    """What a Gemma 3 model has that others don't. Raises UsageError for what isn't done here."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise UsageError(f"{read.where}: {key} is not supported")
    scalar = read.size("query_pre_attn_scalar", 256)
    return {
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        "embed_scale": math.sqrt(hidden),
        "centred_norms": True,
        "four_norms": True,
    }


def _rope_layers(raw: Mapping[str, Any], name: str, layers: int, where: str) -> tuple[bool, ...]:
    if name != "SmolLM3ForCausalLM":
        return (True,) * layers
    flags = raw.get("no_rope_layers")
    if flags is None:
        interval = int(raw.get("no_rope_layer_interval", 4))
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(flags) < layers:
        raise UsageError(f"{where}: no_rope_layers names {len(flags)} of {layers} layers")
    return tuple(bool(flag) for flag in flags[:layers])


def _windows(
    raw: Mapping[str, Any], family: Family, name: str, layers: int, where: str
) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", family.sliding_window)
    if family.window_flag and not raw.get("use_sliding_window", False):
        window = None
    if window is None and not family.gemma:
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise UsageError(f"{where}: sliding_window must be a positive whole number")
    if name in ("MistralForCausalLM", "Phi3ForCausalLM"):
        return (window,) * layers
    kinds = raw.get("layer_types")
    if kinds is None and family.gemma:
        every = raw.get("sliding_window_pattern", 6)
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"{where}: sliding_window_pattern must be a positive whole number")
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    if kinds is None and name == "SmolLM3ForCausalLM":
        has_rope = _rope_layers(raw, name, layers, where)
        return tuple(None if rope else window for rope in has_rope)
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise UsageError(f"{where}: layer_types must name full or sliding attention, once a layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _ids(*values: Any) -> tuple[int, ...]:
    """The first that names an id; generation_config.json knows best which ids end an answer."""
    for value in values:
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    return ()


def _dtype(raw: Mapping[str, Any], where: str) -> DType:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    known: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if name not in known:
        raise UsageError(f"{where}: weights of type {name} are not supported")
    return known[name]
