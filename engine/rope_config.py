"""RoPE parameters of a `config.json`, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cache_store.errors import UsageError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
LOCAL_THETA = 10_000.0  # of layers with a sliding window


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


def read_ropes(
    raw: Mapping[str, Any],
    where: str,
    name: str,
    *,
    theta: float,
    partial: bool,
    local: bool,
    head_dim: int,
    max_positions: int,
) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of a model, and that of its layers with a sliding window where it has one of its own.

    name: the architecture. theta: its default. partial: whether it may rotate a part of each head.
    local: whether layers with a window have their own. Newer configs hold everything in
    `rope_parameters`, older ones in `rope_scaling`. Raises UsageError.
    """
    given = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or not isinstance(scaling, dict):
        raise UsageError(f"{where}: RoPE parameters must be an object")

    def read(own: Mapping[str, Any], default: float) -> RopeConfig:
        return _rope(raw, own, where, name, default, partial, head_dim, max_positions)

    if not local:
        return read(given or scaling, theta), None
    if any(not isinstance(value, dict | None) for value in given.values()):
        raise UsageError(f"{where}: rope_parameters must be given per kind of layer")
    full = {"rope_theta": raw.get("rope_theta"), **(given.get("full_attention") or {}), **scaling}
    window = {"rope_theta": raw.get("rope_local_base_freq", LOCAL_THETA)}
    window |= given.get("sliding_attention") or {}
    ropes = (read(full, theta), read(window, LOCAL_THETA))
    for rope in ropes:
        if rope.type not in ("default", "linear"):
            raise UsageError(f"{where}: RoPE type {rope.type!r} is not supported for {name}")
    return ropes


def _rope(
    raw: Mapping[str, Any],
    given: Mapping[str, Any],
    where: str,
    name: str,
    default_theta: float,
    partial_allowed: bool,
    head_dim: int,
    max_positions: int,
) -> RopeConfig:
    if any(isinstance(value, dict) for value in given.values()):
        raise UsageError(f"{where}: RoPE parameters per kind of layer are not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if name == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's early configs called it
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"{where}: RoPE type {kind!r} is not supported", "supported: " + ", ".join(ROPE_TYPES)
        )
    theta = given.get("rope_theta", raw.get("rope_theta"))
    theta = default_theta if theta is None else theta
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else float(partial)
    if not 0 < partial <= 1:
        raise UsageError(f"{where}: partial_rotary_factor {partial} is not between 0 and 1")
    if partial != 1.0 and not partial_allowed:
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
