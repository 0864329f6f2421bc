"""What a checkpoint's `config.json` says, checked and reduced to what the decoder needs.

Everything that would compute something else than the declared model is refused here, by name,
before any weight is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cache_store.errors import NotFoundError, UsageError
from cache_store.keys import DType

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


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
}


@dataclass(frozen=True)
class RopeConfig:
    """RoPE parameters; `short_factor` and `long_factor` are longrope's, per frequency."""

    type: RopeType
    theta: float
    partial: float = 1.0
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


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
    local_rope: RopeConfig | None  # of layers with a sliding window, where theirs is another
    rope_layers: tuple[bool, ...]  # False: a layer without RoPE
    windows: tuple[int | None, ...]  # sliding window per layer, None: attends to everything
    eos_ids: tuple[int, ...]
    dtype: DType  # the checkpoint's own

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens, the declared RoPE was made for."""
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_positions * self.rope.factor)
        if self.rope.type == "yarn":
            return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))
        return self.max_positions


def load_config(model_dir: Path) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json`, for the end-of-text ids).

    Raises NotFoundError where there is no `config.json`, UsageError where the model is not one
    that can be computed here.
    """
    path = model_dir / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise NotFoundError(
            f"{model_dir}: no config.json there",
            "give a directory in the Hugging Face layout, or a name from `cacheblend models ls`",
        )
    generation = _read_json(model_dir / "generation_config.json") or {}
    return parse_config(raw, generation, where=str(path))


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
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
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
    if raw.get("quantization_config"):
        raise UsageError(
            f"{where}: quantised weights are not supported", "use the bf16, fp16 or fp32 weights"
        )
    read = _Reader(raw, where)
    layers, heads = read.size("num_hidden_layers"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    hidden = read.size("hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise UsageError(f"{where}: hidden_size {hidden} is not a multiple of {heads} heads")
    head_dim = read.size("head_dim", hidden // heads)
    if heads % kv_heads:
        raise UsageError(f"{where}: {heads} query heads do not divide by {kv_heads} KV heads")
    activation = str(raw.get("hidden_act", "silu"))
    if activation not in ("silu", "gelu", "gelu_pytorch_tanh"):
        raise UsageError(f"{where}: activation {activation!r} is not supported", "supported: silu")
    bias = bool(raw.get("attention_bias", False))
    max_positions = read.size("max_position_embeddings")
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
        rope=_rope(raw, family, name, head_dim, max_positions, where),
        local_rope=None,
        rope_layers=_rope_layers(raw, name, layers, where),
        windows=_windows(raw, family, name, layers, where),
        eos_ids=_ids((generation or {}).get("eos_token_id"), raw.get("eos_token_id")),
        dtype=_dtype(raw, where),
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


def _rope(
    raw: Mapping[str, Any], family: Family, name: str, head_dim: int, max_positions: int, where: str
) -> RopeConfig:
    """Newer configs hold everything in `rope_parameters`, older ones in `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
        raise UsageError(f"{where}: RoPE parameters per kind of layer are not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if name == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's early configs called it
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"{where}: RoPE type {kind!r} is not supported", "supported: " + ", ".join(ROPE_TYPES)
        )
    theta = given.get("rope_theta", raw.get("rope_theta"))
    theta = family.rope_theta if theta is None else theta
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else float(partial)
    if not 0 < partial <= 1:
        raise UsageError(f"{where}: partial_rotary_factor {partial} is not between 0 and 1")
    if partial != 1.0 and not family.partial_rotary:
        raise UsageError(f"{where}: partial_rotary_factor is not supported for {name}")
    original = raw.get("original_max_position_embeddings") if kind != "dynamic" else None
    original = original or given.get("original_max_position_embeddings") or max_positions
    factor = given.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise UsageError(f"{where}: RoPE type {kind} without a factor")
        factor = max_positions / original
    rotary = int(head_dim * partial)
    if rotary % 2:
        raise UsageError(f"{where}: an odd number of rotated dimensions ({rotary})")
    short, long = given.get("short_factor") or (), given.get("long_factor") or ()
    if kind == "longrope" and not len(short) == len(long) == rotary // 2:
        raise UsageError(f"{where}: longrope needs {rotary // 2} short and long factors")
    numbers = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    try:
        config = RopeConfig(
            type=kind,
            theta=float(theta),
            partial=partial,
            factor=float(factor),
            original_max_positions=int(original),
            attention_factor=_maybe_float(given.get("attention_factor")),
            mscale=_maybe_float(given.get("mscale")),
            mscale_all_dim=_maybe_float(given.get("mscale_all_dim")),
            truncate=bool(given.get("truncate", True)),
            short_factor=tuple(float(f) for f in short),
            long_factor=tuple(float(f) for f in long),
            **{key: float(given.get(key) or default) for key, default in numbers.items()},
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: a RoPE parameter is not a number ({error})") from error
    if not (math.isfinite(config.theta) and config.theta > 0 and config.factor > 0):
        raise UsageError(f"{where}: RoPE theta and factor must be positive")
    return config


def _maybe_float(value: Any) -> float | None:
    return None if value is None else float(value)


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
    if window is None:
        return (None,) * layers
    if not isinstance(window, int) or window < 1:
        raise UsageError(f"{where}: sliding_window must be a positive whole number")
    if name in ("MistralForCausalLM", "Phi3ForCausalLM"):
        return (window,) * layers
    kinds = raw.get("layer_types")
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
