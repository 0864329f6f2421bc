"""Rotary position embedding: frequencies of every supported kind, and the rotation itself.

Frequencies follow the models' reference code: RoFormer (arXiv 2104.09864), linear and NTK
interpolation, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753) and Llama 3.1's smoothing.
"""

import math
from dataclasses import dataclass

import torch

from engine.config import ModelConfig
from engine.rope_config import RopeConfig

Rows = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of T positions, float32 [T, dim], as `rotate` takes them."""


@dataclass(frozen=True)
class Tables:
    """cos and sin of some positions, for every layer.

    kinds: rows for each kind of layer there is; most models have one. kind_of: a layer's kind,
    None for one without RoPE. `tables[index]`, a slice or int64 [T], picks positions by row.
    """

    kinds: tuple[Rows, ...]
    kind_of: tuple[int | None, ...]

    def layer(self, layer: int) -> Rows | None:
        """The rows a layer's keys and queries are rotated by; None: they are not."""
        kind = self.kind_of[layer]
        return None if kind is None else self.kinds[kind]

    def __getitem__(self, index: slice | torch.Tensor) -> "Tables":
        return Tables(tuple((cos[index], sin[index]) for cos, sin in self.kinds), self.kind_of)

    def back(self) -> "Tables":
        """The rows that turn back what these have turned; theirs may be scaled, as some kinds'
        are."""
        return Tables(tuple(_back(*rows) for rows in self.kinds), self.kind_of)


def _back(cos: torch.Tensor, sin: torch.Tensor) -> Rows:
    scale = cos[:1, :1].square() + sin[:1, :1].square()
    return cos / scale, -sin / scale


class Rope:
    """Rotates queries and keys to absolute positions.

    Kinds whose frequencies depend on the length of the whole sequence (dynamic, longrope) name
    that dependence in `regime`: keys and hidden states computed in different regimes differ.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config.rope
        self.max_positions = config.max_positions
        self.dim = int(config.head_dim * config.rope.partial)
        self.device = device
        self.kinds = (config.rope, *([config.local_rope] if config.local_rope else []))
        self._kind_of = tuple(
            (None if not turned else 1 if config.local_rope and window else 0)
            for turned, window in zip(config.rope_layers, config.windows, strict=True)
        )
        self._tables: dict[str, Tables] = {}

    def regime(self, length: int) -> str:
        """Names the set of frequencies a sequence of `length` tokens uses; "" if all the same."""
        if self.config.type == "longrope":
            return "long" if length > self.config.original_max_positions else "short"
        if self.config.type == "dynamic" and length > self.max_positions:
            return f"ntk-{length}"
        return ""

    def tables(self, length: int, reach: int | None = None) -> Tables:
        """cos and sin for positions 0..max(length, reach)-1, or more, in the regime of `length`.

        Each is float32 [positions, dim], as `rotate` takes them: both halves hold the same angles,
        and sin's first half is negated. Scaled by the kind's attention factor. `reach` lets a
        sequence grow (decoding) without leaving the regime it began in.
        """
        regime = self.regime(length)
        rows = max(length, reach or 0)
        known = self._tables.get(regime)
        if known is None or known.kinds[0][0].shape[0] < rows:
            known = Tables(
                tuple(self._table(kind, length, rows) for kind in self.kinds), self._kind_of
            )
            if regime.startswith("ntk-"):  # one per length: keep just the last
                self._tables = {k: v for k, v in self._tables.items() if not k.startswith("ntk-")}
            self._tables[regime] = known
        return known

    def _table(self, kind: RopeConfig, length: int, rows: int) -> Rows:
        frequencies, scale = inverse_frequencies(kind, self.dim, self.max_positions, length)
        angles = torch.outer(torch.arange(rows, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        return both[0].to(self.device), both[1].to(self.device)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotates `x` [tokens, heads, head_dim] by cos and sin [tokens, dim] (`Rope.tables`).

    The products are formed in float32 and rounded once to `x`'s type. Dimensions past `dim` are
    copied. `out` (same shape, any strides, e.g. a slice of the KV cache) receives the result.
    """
    out = torch.empty_like(x) if out is None else out
    dim = cos.shape[-1]
    turned = x[..., :dim].to(torch.float32, copy=True)
    swapped = torch.cat([turned[..., dim // 2 :], turned[..., : dim // 2]], -1)
    turned.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])
    if dim == x.shape[-1]:
        return out.copy_(turned)
    out[..., :dim] = turned
    out[..., dim:] = x[..., dim:]
    return out


def inverse_frequencies(
    rope: RopeConfig, dim: int, max_positions: int, length: int
) -> tuple[torch.Tensor, float]:
    """float32 [dim/2] frequencies and the factor on cos and sin, for `length` tokens in all."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / rope.theta**exponents
    match rope.type:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "dynamic":
            stretched = max(length, max_positions)
            growth = rope.factor * stretched / max_positions - (rope.factor - 1)
            base = rope.theta * growth ** (dim / (dim - 2))
            return 1.0 / base**exponents, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, dim), _yarn_scale(rope)
        case "longrope":
            long = length > rope.original_max_positions
            factors = torch.tensor(rope.long_factor if long else rope.short_factor)
            return plain / factors, _longrope_scale(rope)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(
        wavelength > low,
        plain / rope.factor,
        torch.where(wavelength < high, plain, between),
    )


def _yarn(rope: RopeConfig, plain: torch.Tensor, dim: int) -> torch.Tensor:
    def turning_dim(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = turning_dim(rope.beta_fast), turning_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
