"""The inner loops in torch: every device and type, and the reference for the others."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.attention import AttentionPlan, attend, mass
from engine.kernels.protocol import Run, Scratch
from engine.rope import rotate
from engine.weights import LayerWeights


class PlainKernels:
    """See `engine.kernels.protocol`."""

    name = "torch"
    notes: tuple[str, ...] = ()

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        """In float32, rounded once; torch's own is several times slower on a CPU."""
        y = x.to(torch.float32, copy=True)
        size = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return out.copy_(y.mul_(scale).mul_(weight.float()))

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return self.norm(x.add_(delta), weight, eps, out)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def gated(
        self, x: torch.Tensor, layer: LayerWeights, activation: str, out: Scratch
    ) -> torch.Tensor:
        gate = self.linear(x, layer.gate, layer.gate_bias, out("gate"))
        up = self.linear(x, layer.up, layer.up_bias, out("up"))
        if activation == "silu":
            return F.silu(gate, inplace=True).mul_(up)
        return torch.mul(_activated(gate, activation), up, out=gate)

    def gate_pairs(self, x: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.mul(_activated(gate, activation), up, out=out)

    def place(
        self,
        x: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if places is not None:
            return out.index_copy_(0, places, x if rows is None else rotate(x, *rows))
        return out.copy_(x) if rows is None else rotate(x, *rows, out=out)

    def place_runs(
        self,
        runs: Sequence[Run],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        for start, k, v in runs:
            here = slice(start, start + len(k))
            rows = None if tables is None else (tables[0][here], tables[1][here])
            self.place(k, rows, k_out[:, here].transpose(0, 1))
            self.place(v, None, v_out[:, here].transpose(0, 1))

    def shift(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        spans: torch.Tensor,
        shifts: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        starts, ends = spans  # on the host, which so needn't wait for a device
        lengths = ends - starts
        of = torch.repeat_interleave(lengths)
        first = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(len(of)) + (starts - first)[of]
        of, positions = of.to(k.device), positions.to(k.device)
        to_k, to_v = shifts[of].unbind(1)  # [T, kv_heads, head_dim]
        if tables is not None:
            to_k = rotate(to_k, tables[0][positions], tables[1][positions])
        for x, more in ((k, to_k), (v, to_v)):
            x[:, positions] = (x[:, positions].float() + more.transpose(0, 1)).to(x.dtype)

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
        stored_k, stored_v = (x[:, places].transpose(0, 1).float() for x in (k, v))
        if rows is not None:
            stored_k = rotate(stored_k, *rows)
        apart = torch.stack([fresh_k.float() - stored_k, fresh_v.float() - stored_v], 1)
        token, limits = torch.arange(len(apart), device=k.device), bounds.to(k.device)[:, None]
        mine = (token >= limits[:-1]) & (token < limits[1:])  # [S, T]
        # A product, for it adds up in the same order every time.
        return (mine.float() @ apart.flatten(1)).view(-1, *apart.shape[1:])

    def norms(self, x: torch.Tensor) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return norms

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return attend(q, k, v, plan, window, out)

    def mass(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        counted: int,
    ) -> torch.Tensor:
        return mass(q, k, plan, window, counted)


def _activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")
