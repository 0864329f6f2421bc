"""The inner loops in C (`attention.c`, `linear.c`, `rows.c`), for bfloat16 on a CPU.

The library is built when the project is installed, where a C compiler is there; it is found as a
file and called through ctypes. CACHEBLEND_NATIVE=0 does without it.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from engine.attention import AttentionPlan
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
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _INT),
    ),
    "cb_place_runs": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _INT),
    ),
    "cb_attend": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    ),
}
_GROUP = 32  # keys the attention kernel works on at a time
_FEW = 16  # query rows a KV head, below which torch's attention is as fast
_MANY = 1024  # rows from which on torch's products are faster
_WIDE = 4096  # inner dimension up to which ours were measured


@cache
def library() -> ctypes.CDLL | None:
    """The built kernels; None where there are none, they don't load, or they aren't wanted."""
    if os.environ.get("CACHEBLEND_NATIVE", "1").strip().lower() in ("0", "off", "no", "false"):
        return None
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            found = ctypes.CDLL(str(path))
            for name, types in _SIGNATURES.items():
                getattr(found, name).argtypes = types
                getattr(found, name).restype = None
        except (OSError, AttributeError):  # of another machine, or of an older version
            continue
        return found
    return None


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class NativeKernels:
    """See `engine.kernels.protocol`. All tensors are bfloat16 on the CPU, cos and sin float32.

    What a kernel does not cover (activations, head sizes, strides) torch does.
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
        if not (x.is_contiguous() and out.is_contiguous()):
            return self._plain.norm(x, weight, eps, out)
        self._norm(x, None, weight, eps, out)
        return out

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        if not (x.is_contiguous() and delta.is_contiguous() and out.is_contiguous()):
            return self._plain.add_norm(x, delta, weight, eps, out)
        self._norm(x, delta.data_ptr(), weight, eps, out)
        return out

    def _norm(
        self,
        x: torch.Tensor,
        delta: int | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        size = x.shape[-1]
        self._c.cb_norm(
            *(x.data_ptr(), delta, weight.data_ptr(), out.data_ptr()),
            *(x.numel() // size, size, eps, torch.get_num_threads()),
        )

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if len(x) > _MANY or not self._fits(x, weight, 32):
            return self._plain.linear(x, weight, bias, out)
        self._c.cb_linear(
            *(x.data_ptr(), weight.data_ptr(), _address(bias), None, None, out.data_ptr()),
            *(len(x), x.shape[1], len(weight), 0, torch.get_num_threads()),
        )
        return out

    def gated(
        self, x: torch.Tensor, layer: LayerWeights, activation: str, out: Scratch
    ) -> torch.Tensor:
        gelu = activation == "gelu_pytorch_tanh"
        if not (gelu or activation == "silu"):
            return self._plain.gated(x, layer, activation, out)
        threads, gate = torch.get_num_threads(), out("gate")
        if self._fits(x, layer.gate, 16) and layer.up.is_contiguous():
            self._c.cb_linear(
                *(x.data_ptr(), layer.gate.data_ptr(), _address(layer.gate_bias)),
                *(layer.up.data_ptr(), _address(layer.up_bias), gate.data_ptr()),
                *(len(x), x.shape[1], len(layer.gate), gelu, threads),
            )
            return gate
        self.linear(x, layer.gate, layer.gate_bias, gate)
        up = self.linear(x, layer.up, layer.up_bias, out("up"))
        self._c.cb_gate(gate.data_ptr(), up.data_ptr(), gate.numel(), gelu, threads)
        return gate

    def _fits(self, x: torch.Tensor, weight: torch.Tensor, columns: int) -> bool:
        """Whether `cb_linear` covers a product."""
        return (
            self._tiles
            and x.shape[1] % 32 == 0
            and x.shape[1] <= _WIDE
            and len(weight) % columns == 0
            and x.is_contiguous()
            and weight.is_contiguous()
        )

    def place(
        self,
        x: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, heads, dim = x.shape
        tables = rows or ()
        if (
            x.stride()[1:] != (dim, 1)
            or out.stride(2) != 1
            or not all(table.is_contiguous() for table in tables)
        ):
            return self._plain.place(x, rows, out, places)
        cos, sin = (table.data_ptr() for table in tables) if tables else (None, None)
        self._c.cb_place(
            *(x.data_ptr(), x.stride(0), cos, sin, out.data_ptr()),
            None if places is None else places.data_ptr(),
            *(tokens, heads, dim, tables[0].shape[-1] if tables else 0),
            *(out.stride(0), out.stride(1), torch.get_num_threads()),
        )
        return out

    def place_runs(
        self,
        runs: Sequence[Run],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        heads, length, dim = k_out.shape
        whole = [x for start, k, v in runs for x in (k, v)] + list(tables or ())
        if (
            k_out.stride() != v_out.stride()
            or k_out.stride()[1:] != (dim, 1)
            or not all(x.is_contiguous() for x in whole)
        ):
            return self._plain.place_runs(runs, tables, k_out, v_out)
        for start, k, _ in runs:
            if start + len(k) > length:
                raise ValueError(f"tokens up to {start + len(k)} in a KV cache of {length}")
        count, addresses = len(runs), _POINTER * len(runs)
        cos, sin = (x.data_ptr() for x in tables) if tables else (None, None)
        self._c.cb_place_runs(
            addresses(*(k.data_ptr() for _, k, _ in runs)),
            addresses(*(v.data_ptr() for _, _, v in runs)),
            (_LONG * count)(*(start for start, _, _ in runs)),
            (_LONG * count)(*(len(k) for _, k, _ in runs)),
            *(count, cos, sin, k_out.data_ptr(), v_out.data_ptr(), heads, dim),
            *(tables[0].shape[-1] if tables else 0, k_out.stride(0), torch.get_num_threads()),
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
        if (
            not self._tiles
            or dim % _GROUP
            or dim > 256
            or tokens * heads // kv_heads < _FEW
            or not (q.is_contiguous() and out.is_contiguous())
            or k.stride() != v.stride()
            or k.stride()[1:] != (dim, 1)
        ):
            return self._plain.attend(q, k, v, plan, window, out)
        keys = plan.bounds[-1] + 1
        if keys > capacity:
            raise ValueError(f"position {plan.bounds[-1]} in a KV cache of {capacity}")
        size = kv_heads * dim * _GROUP * (-(-keys // _GROUP) + 1)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        self._c.cb_attend(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            plan.positions.data_ptr(),
            *(tokens, heads, kv_heads, dim, k.stride(0), window or 0, dim**-0.5),
            *(self._scratch.data_ptr(), torch.get_num_threads()),
        )
        return out
