"""The inner loops in C, the sources beside this file, for bfloat16 on a CPU.

The library is built when the project is installed, where a C compiler is there; it is found as a
file and called through ctypes. CACHEBLEND_NATIVE=0 does without it.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from engine.attention import AttentionPlan, check_mass
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Run, Scratch
from engine.weights import LayerWeights

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "cb_norm": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _INT),
    "cb_linear": (*(_POINTER,) * 6, _LONG, _LONG, _LONG, _INT, _INT),
    "cb_gate": (_POINTER, _POINTER, _LONG, _INT, _INT),
    "cb_place": (
        *(_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _INT),
    ),
    "cb_place_runs": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _INT),
    ),
    "cb_shift": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _INT),
    ),
    "cb_attend": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    ),
    "cb_attend_few": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    ),
    "cb_mass": (
        *(_POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _LONG, _POINTER, _INT),
    ),
}
INTERFACE = 3  # native.h's CB_INTERFACE
_ANSWERS = ("cb_linear", "cb_place")  # they return whether they did it
_GROUP = 32  # keys the attention kernel works on at a time
_BLOCK, _TILE = 128, 16  # keys and query rows `cb_mass` works on
_ROWS = 96  # query rows a KV head that it has in memory, unless a single query has more
_SOME = 384  # query rows a KV head up to which `cb_attend_few` is faster
_SPAN = 1024  # keys that it takes at a time
_MANY = 1024  # rows from which on torch's products are faster
_WIDE = 4096  # inner dimension up to which ours were measured


def wanted() -> bool:
    """Whether CACHEBLEND_NATIVE leaves them on."""
    value = os.environ.get("CACHEBLEND_NATIVE", "1")
    return value.strip().lower() not in ("0", "off", "no", "false")


@cache
def library() -> ctypes.CDLL | None:
    """The built kernels; None where there are none, they don't load, or they aren't wanted."""
    if not wanted():
        return None
    built = (load(path) for path in sorted(Path(__file__).parent.glob("_native*.so")))
    return next((found for found in built if found is not None), None)


def load(path: Path) -> ctypes.CDLL | None:
    """The kernels in a file; None if they are of another machine, or of another version."""
    try:
        found = ctypes.CDLL(str(path))
        if found.cb_interface() != INTERFACE:
            return None
        for name, types in _SIGNATURES.items():
            getattr(found, name).argtypes = types
            getattr(found, name).restype = _INT if name in _ANSWERS else None
    except (OSError, AttributeError):
        return None
    return found


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _tables(
    rows: tuple[torch.Tensor, torch.Tensor] | None, tokens: int
) -> tuple[int, int | None, int | None]:
    """How many dimensions cos and sin of so many positions turn, and where they are; -1 where
    these are not all there, one after the other."""
    if rows is None:
        return 0, None, None
    cos, sin = rows
    turned = cos.shape[-1]
    whole = cos.is_contiguous() and sin.is_contiguous()
    there = whole and sin.shape[-1] == turned and min(cos.numel(), sin.numel()) >= tokens * turned
    return (turned if there else -1), cos.data_ptr(), sin.data_ptr()


class NativeKernels:
    """See `engine.kernels.protocol`. All tensors are bfloat16 on the CPU, cos and sin float32.

    What a kernel does not cover (activations, head sizes, strides) torch does. It is also left to
    refuse what makes no sense: shapes that don't go together, places that aren't there.
    """

    name = "native"
    notes: tuple[str, ...] = ()

    def __init__(self, built: ctypes.CDLL) -> None:
        self._c, self._plain = built, PlainKernels()
        self._tiles = bool(built.cb_can_attend())
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        if not self._norm(x, None, weight, eps, out):
            return self._plain.norm(x, weight, eps, out)
        return out

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        if not self._norm(x, delta, weight, eps, out):
            return self._plain.add_norm(x, delta, weight, eps, out)
        return out

    def _norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> bool:
        """Whether the kernel covers it, and so did it."""
        size, elements = x.shape[-1], x.numel()
        if (
            weight.dtype != torch.bfloat16
            or weight.numel() != size
            or out.numel() != elements
            or not (x.is_contiguous() and weight.is_contiguous() and out.is_contiguous())
            or (delta is not None and not (delta.is_contiguous() and delta.numel() == elements))
        ):
            return False
        self._c.cb_norm(
            *(x.data_ptr(), _address(delta), weight.data_ptr(), out.data_ptr()),
            *(elements // size, size, eps, torch.get_num_threads()),
        )
        return True

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        rows, inner = x.shape  # `len` of a tensor takes longer
        done = (
            rows <= _MANY
            and self._fits(x, weight, out, 32)
            and self._c.cb_linear(
                *(x.data_ptr(), weight.data_ptr(), _address(bias), None, None, out.data_ptr()),
                *(rows, inner, weight.shape[0], 0, torch.get_num_threads()),
            )
        )
        return out if done else self._plain.linear(x, weight, bias, out)

    def gated(
        self, x: torch.Tensor, layer: LayerWeights, activation: str, out: Scratch
    ) -> torch.Tensor:
        gelu = activation == "gelu_pytorch_tanh"
        if not (gelu or activation == "silu"):
            return self._plain.gated(x, layer, activation, out)
        threads, gate = torch.get_num_threads(), out("gate")
        if (
            self._fits(x, layer.gate, gate, 16)
            and layer.up.shape == layer.gate.shape
            and layer.up.is_contiguous()
            and self._c.cb_linear(
                *(x.data_ptr(), layer.gate.data_ptr(), _address(layer.gate_bias)),
                *(layer.up.data_ptr(), _address(layer.up_bias), gate.data_ptr()),
                *(*x.shape, layer.gate.shape[0], gelu, threads),
            )
        ):
            return gate
        self.linear(x, layer.gate, layer.gate_bias, gate)
        up = self.linear(x, layer.up, layer.up_bias, out("up"))
        self._c.cb_gate(gate.data_ptr(), up.data_ptr(), gate.numel(), gelu, threads)
        return gate

    def _fits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, columns: int) -> bool:
        """Whether `cb_linear` covers a product."""
        (rows, inner), (width, depth) = x.shape, weight.shape
        return (
            self._tiles
            and inner == depth
            and inner % 32 == 0
            and inner <= _WIDE
            and width % columns == 0
            and out.shape == (rows, width)
            and x.is_contiguous()
            and weight.is_contiguous()
            and out.is_contiguous()
        )

    def place(
        self,
        x: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, heads, dim = x.shape
        x_stride, *x_strides = x.stride()
        room, *shape = out.shape
        token_stride, head_stride, step = out.stride()
        turned, cos, sin = _tables(rows, tokens)
        done = (
            x_strides == [dim, 1]
            and step == 1
            and shape == [heads, dim]
            and (room if places is None else places.numel()) == tokens
            and (places is None or places.is_contiguous())
            and 0 <= turned <= dim
            and self._c.cb_place(
                *(x.data_ptr(), x_stride, cos, sin, out.data_ptr(), _address(places)),
                *(room, tokens, heads, dim, turned, token_stride, head_stride),
                torch.get_num_threads(),
            )
        )
        return out if done else self._plain.place(x, rows, out, places)

    def place_runs(
        self,
        runs: Sequence[Run],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        heads, length, dim = k_out.shape
        counts = [k.shape[0] for _, k, _ in runs]
        last = max((run[0] + n for run, n in zip(runs, counts, strict=True)), default=0)
        turned, cos, sin = _tables(tables, last)
        if (
            k_out.shape != v_out.shape
            or k_out.stride() != v_out.stride()
            or k_out.stride()[1:] != (dim, 1)
            or last > length
            or not 0 <= turned <= dim
            or not all(
                start >= 0
                and k.numel() == v.numel() == n * heads * dim
                and k.is_contiguous()
                and v.is_contiguous()
                for (start, k, v), n in zip(runs, counts, strict=True)
            )
        ):
            return self._plain.place_runs(runs, tables, k_out, v_out)
        count, addresses = len(runs), _POINTER * len(runs)
        self._c.cb_place_runs(
            addresses(*(k.data_ptr() for _, k, _ in runs)),
            addresses(*(v.data_ptr() for _, _, v in runs)),
            (_LONG * count)(*(start for start, _, _ in runs)),
            (_LONG * count)(*counts),
            *(count, cos, sin, k_out.data_ptr(), v_out.data_ptr(), heads, dim),
            *(turned, k_out.stride(0), torch.get_num_threads()),
        )
        return None

    def shift(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        spans: torch.Tensor,
        shifts: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        heads, length, dim = k.shape
        first, last = (int(spans.min()), int(spans.max())) if spans.numel() else (0, 0)
        turned, cos, sin = _tables(tables, last)
        if (
            k.shape != v.shape
            or k.stride() != v.stride()
            or k.stride()[1:] != (dim, 1)
            or first < 0
            or last > length
            or not 0 <= turned <= dim
            or not (spans.is_contiguous() and shifts.is_contiguous())
            or shifts.dtype != torch.float32
            or shifts.shape != (spans.shape[1], 2, heads, dim)
        ):
            return self._plain.shift(k, v, spans, shifts, tables)
        self._c.cb_shift(
            *(k.data_ptr(), v.data_ptr(), spans[0].data_ptr(), spans[1].data_ptr()),
            *(shifts.data_ptr(), spans.shape[1], cos, sin, heads, dim, turned, k.stride(0)),
            torch.get_num_threads(),
        )
        return None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        kv_heads, capacity, _ = k.shape
        keys = plan.bounds[-1] + 1
        if tokens != len(plan) or keys > capacity:
            raise ValueError(
                f"{tokens} queries, {len(plan)} positions, the last {keys - 1}, "
                f"in a KV cache of {capacity}"
            )
        if (
            not self._tiles
            or dim % _GROUP
            or dim > 256
            or heads % kv_heads
            or not (q.is_contiguous() and out.is_contiguous())
            or out.numel() != q.numel()
            or k.shape != (kv_heads, capacity, dim)
            or k.shape != v.shape
            or k.stride() != v.stride()
            or k.stride()[1:] != (dim, 1)
        ):
            return self._plain.attend(q, k, v, plan, window, out)
        rows = tokens * heads // kv_heads
        if rows <= _SOME:
            attend, spans = self._c.cb_attend_few, -(-keys // _SPAN)
            padded = kv_heads * (-(-rows // _TILE) * _TILE)
            scratch = self._room(2 * padded * (dim // 2 + spans * (dim + 2)))
        else:
            attend = self._c.cb_attend
            scratch = self._room(kv_heads * dim * _GROUP * (-(-keys // _GROUP) + 1))
        narrow = window is not None and window < keys
        attend(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            plan.positions.data_ptr(),
            *(tokens, heads, kv_heads, dim, k.stride(0), window if narrow else 0, dim**-0.5),
            *(scratch.data_ptr(), torch.get_num_threads()),
        )
        return out

    def mass(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        counted: int,
    ) -> torch.Tensor:
        check_mass(q, k, plan, counted)
        _, heads, dim = q.shape
        kv_heads, capacity, _ = k.shape
        if (
            not self._tiles
            or not counted
            or dim % 32
            or dim > 256
            or not q.is_contiguous()
            or k.stride()[1:] != (dim, 1)
        ):
            return self._plain.mass(q, k, plan, window, counted)
        keys, shared = plan.bounds[-1] + 1, heads // kv_heads
        steps = -(-counted * shared // _ROWS)
        step = -(-counted // steps)
        rows = -(-step * shared // _TILE) * _TILE
        floats = rows * (dim // 2 + 1 + -(-keys // _BLOCK) * (_BLOCK + 2 * _TILE))
        scratch = self._room(2 * floats)
        out = torch.zeros(heads, capacity)
        narrow = window is not None and window < keys
        self._c.cb_mass(
            *(q[-counted:].data_ptr(), k.data_ptr(), out.data_ptr()),
            plan.positions[-counted:].data_ptr(),
            *(counted, heads, kv_heads, dim, k.stride(0), capacity, window if narrow else 0),
            *(dim**-0.5, step, scratch.data_ptr(), torch.get_num_threads()),
        )
        return out

    def _room(self, size: int) -> torch.Tensor:
        """Memory for so many elements, which the next call overwrites."""
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        return self._scratch
