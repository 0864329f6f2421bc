"""The inner loops in C for bfloat16 on a CPU: which of them covers what it is asked for."""

import ctypes
from collections.abc import Sequence

import torch

from engine.attention import AttentionPlan, check_mass
from engine.kernels.built import LONG, POINTER
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Run, Scratch
from engine.weights import LayerWeights

_GROUP = 32  # keys the attention kernel works on at a time
_BLOCK, _TILE = 128, 16  # keys and query rows `cb_mass` works on
_ROWS = 96  # query rows a KV head that it has in memory, unless a single query has more
_SOME = 384  # query rows a KV head up to which `cb_attend_few` is faster
_SPAN = 1024  # keys that it takes at a time
_MANY = 1024  # rows from which on torch's products are faster
_WIDE = 4096  # inner dimension up to which ours were measured


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

    def gate_pairs(self, x: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
        rows, width = out.shape
        gelu = activation == "gelu_pytorch_tanh"
        done = (
            (gelu or activation == "silu")
            and self._tiles
            and width % 16 == 0
            and x.shape == (rows, 2 * width)
            and x.is_contiguous()
            and out.is_contiguous()
            and self._c.cb_gate_pairs(
                *(x.data_ptr(), out.data_ptr(), rows, width, gelu, torch.get_num_threads())
            )
        )
        return out if done else self._plain.gate_pairs(x, activation, out)

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
        count, addresses = len(runs), POINTER * len(runs)
        self._c.cb_place_runs(
            addresses(*(k.data_ptr() for _, k, _ in runs)),
            addresses(*(v.data_ptr() for _, _, v in runs)),
            (LONG * count)(*(start for start, _, _ in runs)),
            (LONG * count)(*counts),
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

    def deviations(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        places: torch.Tensor,
        bounds: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        heads, length, dim = k.shape
        turned, cos, sin = _tables(rows, len(places))
        if (
            len(places) == 0
            or not 0 <= int(places.min()) <= int(places.max()) < length
            or k.shape != v.shape
            or k.stride() != v.stride()
            or k.stride()[1:] != (dim, 1)
            or not 0 <= turned <= dim
            or not (fresh_k.shape == fresh_v.shape == (len(places), heads, dim))
            or not all(x.is_contiguous() for x in (fresh_k, fresh_v, places, bounds))
        ):
            return self._plain.deviations(k, v, fresh_k, fresh_v, places, bounds, rows)
        groups = len(bounds) - 1
        sums = torch.empty(groups, 2, heads, dim)
        self._c.cb_deviations(
            *(k.data_ptr(), v.data_ptr(), fresh_k.data_ptr(), fresh_v.data_ptr()),
            *(places.data_ptr(), bounds.data_ptr(), sums.data_ptr(), groups, cos, sin),
            *(heads, dim, turned, k.stride(0), torch.get_num_threads()),
        )
        return sums

    def norms(self, x: torch.Tensor) -> torch.Tensor:
        heads, rows, size = x.shape
        if x.stride()[1:] != (size, 1):
            return self._plain.norms(x)
        out = torch.empty(heads, rows)
        self._c.cb_norms(
            *(x.data_ptr(), out.data_ptr(), heads, rows, size, x.stride(0)),
            torch.get_num_threads(),
        )
        return out

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
