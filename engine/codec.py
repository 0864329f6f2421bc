"""Between the KV that is computed with and the KV that is stored.

Quantised as KIVI has it (arXiv 2402.02750): K per channel, whose size differs much from one to the
next but little between tokens, and V per token. `cache_store.entry` says how it is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch

from cache_store.errors import CacheblendError, UsageError
from cache_store.keys import CODE_BITS, GROUP, PART_ALIGNMENT, DType, KVSpec
from engine.kernels.built import library
from engine.model import DTYPES

Buffers = tuple[memoryview, memoryview]

KV_DTYPES: tuple[DType, ...] = get_args(DType)

_LARGEST = {"fp8": 448.0, "int8": 255.0, "int4": 15.0}  # code
_STORED = tuple(CODE_BITS)  # as `cb_unpack` counts them
_WANTED = {torch.bfloat16: 0, torch.float32: 1}
_LEAST_STEP = torch.finfo(torch.float32).tiny  # so that no code times it is rounded to 0


@dataclass(frozen=True)
class Codec:
    """One model's K before RoPE and V, [T, kv_heads, head_dim], to what is stored and back.

    Equal numbers give equal bytes; and the same bytes equal numbers, with kernels in C or without.
    """

    stored: DType
    computed: torch.dtype
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: KVSpec, computed: torch.dtype) -> Codec:
        return cls(spec.dtype, computed, spec.kv_heads, spec.head_dim)

    @property
    def plain(self) -> bool:
        """Whether it is stored just as it is computed with."""
        return DTYPES.get(self.stored) == self.computed

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Buffers:
        """K and V on the host as contiguous bytes; those of the tensors, where nothing changes.

        Raises CacheblendError for what the stored type cannot hold: numbers that are not finite,
        and in fp16 those beyond 65,504; anything goes where nothing changes.
        """
        if self.stored in DTYPES:
            return self._converted(k), self._converted(v)
        size, dim, group = self.kv_heads * self.head_dim, self.head_dim, GROUP[self.stored]
        of_k = self._codes(k.float().reshape(1, -1, size), group)
        of_v = self._codes(v.float().reshape(-1, dim, 1), group)
        runs = torch.split(of_v.codes[..., 0], group, -1)
        if self.stored == "int4":
            return _part(of_k, _nibbles(of_k.codes[0])), _part(
                of_v, torch.cat([_nibbles(run) for run in runs], -1)
            )
        return _part(of_k, of_k.codes), _part(of_v, of_v.codes)

    def decode(self, part: memoryview, is_v: bool, tokens: int, out: torch.Tensor) -> torch.Tensor:
        """K or V, which `encode` gave, in memory on the host, flat, of the computed type.

        Returns the beginning of `out` as [tokens, kv_heads, head_dim].
        """
        size = self.kv_heads * self.head_dim
        out = out[: tokens * size].view(tokens, self.kv_heads, self.head_dim)
        if self.stored in DTYPES:
            return out.copy_(self.view(part, tokens))
        data = torch.frombuffer(part, dtype=torch.uint8) if tokens else torch.empty(0)
        built = library()
        if built is None or self.computed not in _WANTED or data.data_ptr() % 2:
            return out.copy_(self._decoded(data, is_v, tokens))
        built.cb_unpack(
            *(data.data_ptr(), out.data_ptr(), tokens, self.kv_heads, self.head_dim),
            *(GROUP[self.stored], _STORED.index(self.stored), is_v, _WANTED[self.computed]),
        )
        return out

    def decode_heads(
        self, part: memoryview, is_v: bool, tokens: int, heads: slice, out: torch.Tensor
    ) -> torch.Tensor:
        """As `decode`, of some of the heads: [tokens, heads, head_dim]."""
        if self.stored in DTYPES:
            whole = self.view(part, tokens)
        else:
            size = tokens * self.kv_heads * self.head_dim
            whole = self.decode(part, is_v, tokens, torch.empty(size, dtype=self.computed))
        own = whole[:, heads]
        return out[: own.numel()].view(own.shape).copy_(own)

    def view(self, part: memoryview, tokens: int) -> torch.Tensor:
        """What is stored unquantised, in its own memory: [tokens, kv_heads, head_dim]."""
        values = torch.frombuffer(part, dtype=DTYPES[self.stored]) if tokens else torch.empty(0)
        return values.view(tokens, self.kv_heads, self.head_dim)

    def _converted(self, x: torch.Tensor) -> memoryview:
        y = x.to(DTYPES[self.stored])
        if not self.plain and not y.isfinite().all():
            raise self._refused()
        return _bytes(y)

    def _codes(self, x: torch.Tensor, group: int) -> _Codes:
        """x float32 [N, L, M]: groups along L."""
        whole = x.shape[1] // group * group
        n, _, size = x.shape
        parts = [x[:, :whole].reshape(n, -1, group, size)] if whole else []
        if whole < x.shape[1]:
            parts.append(x[:, None, whole:])
        found = [self._group_codes(part) for part in parts]
        steps, bases, codes = (torch.cat(tensors, 1) for tensors in zip(*found, strict=True))
        return _Codes(steps, bases, codes)

    def _group_codes(self, x: torch.Tensor) -> _Codes:
        """x float32 [N, G, group, M]. Steps and bases [N, G, M], codes [N, G * group, M]."""
        low, high = x.aminmax(dim=2)
        most = _LARGEST[self.stored]
        if self.stored == "fp8":
            base = ((low + high) / 2).bfloat16().float()
            step = _up(torch.maximum(high - base, base - low) / most)
        else:
            base = -_up(-low)
            step = _up((high - base) / most)
        if not (step.isfinite() & base.isfinite()).all():  # an inf or nan has come through
            raise self._refused()
        step = torch.where(step > 0, step.clamp_min(_LEAST_STEP), step)
        over = torch.where(step > 0, step, 1.0).unsqueeze(2)
        code = (x - base.unsqueeze(2)).div_(over).flatten(1, 2)
        if self.stored == "fp8":
            codes = code.clamp_(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = code.round_().clamp_(0, most).to(torch.uint8)
        return _Codes(step.bfloat16(), base.bfloat16(), codes)

    def _decoded(self, data: torch.Tensor, is_v: bool, tokens: int) -> torch.Tensor:
        """As `cb_unpack`, float32."""
        heads, dim, group = self.kv_heads, self.head_dim, GROUP[self.stored]
        # [rows, groups along them, numbers in a step's row]
        rows, length, size = (tokens * heads, dim, 1) if is_v else (1, tokens, heads * dim)
        steps = rows * -(-length // group) * size
        step, base = data[: 4 * steps].view(torch.bfloat16).float().view(2, rows, -1, size)
        packed = data[4 * steps :]
        if self.stored == "int4":
            lengths = [min(group, dim - i) for i in range(0, dim, group)] if is_v else [size]
            widths = [-(-n // 2) for n in lengths]
            lines = packed[: tokens * (heads if is_v else 1) * sum(widths)].view(-1, sum(widths))
            runs = zip(lengths, torch.split(lines, widths, -1), strict=True)
            codes = torch.cat([torch.cat([b & 15, b >> 4], -1)[:, :n] for n, b in runs], -1)
        else:
            codes = packed[: tokens * heads * dim]
        if self.stored == "fp8":
            codes = codes.view(torch.float8_e4m3fn)
        numbers = codes.float().view(rows, length, size)
        at = torch.arange(length) // group
        found: torch.Tensor = base[:, at] + step[:, at] * numbers
        return found.view(tokens, heads, dim)

    def _refused(self) -> CacheblendError:
        return CacheblendError(
            f"this model's KV cannot be stored as {self.stored}: it has numbers that are not "
            "finite there",
            "store it as it is computed: --kv-dtype auto",
        )


def choose_kv_dtype(name: str, computed: DType) -> DType:
    """What KV is stored in: `auto` is what it is computed in. Raises UsageError."""
    if name == "auto":
        return computed
    known = next((dtype for dtype in KV_DTYPES if dtype == name), None)
    if known is None:
        raise UsageError(
            f"--kv-dtype {name}: unknown", f"use auto, {', '.join(KV_DTYPES[:-1])} or int4"
        )
    return known


def precision(dtype: str, kv_dtype: str) -> str:
    """What is computed in and, where KV is stored in another type, that one: "bf16+int8"."""
    return dtype if kv_dtype == dtype else f"{dtype}+{kv_dtype}"


class _Codes(NamedTuple):
    """steps and bases, bf16, and codes, a byte each."""

    steps: torch.Tensor
    bases: torch.Tensor
    codes: torch.Tensor


def _up(x: torch.Tensor) -> torch.Tensor:
    """The next number that bfloat16 has, from x float32 upwards, as float32."""
    near = x.bfloat16().float()
    bits = x.view(torch.int32)
    higher = torch.where(x > 0, (bits + 0xFFFF) & -0x10000, bits & -0x10000).view(torch.float32)
    return torch.where(near == x, x, higher)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [rows, n] below 16 as [rows, ceil(n / 2)]."""
    half = -(-codes.shape[1] // 2)
    low, high = codes[:, :half].clone(), codes[:, half:]
    low[:, : high.shape[1]] |= high << 4
    return low


def _part(grid: _Codes, codes: torch.Tensor) -> memoryview:
    pieces = [_flat_bytes(grid.steps), _flat_bytes(grid.bases), codes.reshape(-1)]
    used = sum(len(piece) for piece in pieces)
    return _bytes(torch.cat([*pieces, torch.zeros(-used % PART_ALIGNMENT, dtype=torch.uint8)]))


def _flat_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _bytes(x: torch.Tensor) -> memoryview:
    view: memoryview = _flat_bytes(x).numpy().data  # bf16 has no buffer type of its own
    return view
