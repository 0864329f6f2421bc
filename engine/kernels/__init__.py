"""The inner loops of the decoder: in C where that was built and fits, in torch everywhere else.

`kernels_for` chooses. Both do the same arithmetic: products accumulated and norms, rotations and
softmax formed in float32, results rounded to the working type.
"""

from typing import Protocol

import torch

from engine.attention import AttentionPlan


class Kernels(Protocol):
    """What a layer does besides its matrix products. T tokens; tensors of one dtype and device."""

    name: str

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        """RMSNorm of x [..., size] over the last dimension, into out."""

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """x += delta, in place; then as `norm`."""

    def gate(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up [T, size], into gate. activation: silu, gelu or
        gelu_pytorch_tanh."""

    def place(
        self,
        x: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes x [T, heads, head_dim], rotated by cos and sin rows [T, dim] (None: as it is),
        to out [N, heads, head_dim] at rows `places` int64 [T] (None: in order; N is T then).

        out's last dimension is contiguous, the others are strided as they like; it may be x.
        """

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention of q [T, heads, head_dim] at the plan's positions over k and v
        [kv_heads, N, head_dim], row i at position i, into out [T, heads, head_dim]."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest there are for tensors of this kind, here."""
    from engine.kernels.plain import PlainKernels

    if device.type == "cpu" and dtype == torch.bfloat16:
        from engine.kernels.native import NativeKernels, library

        found = library()
        if found is not None:
            return NativeKernels(found)
    return PlainKernels()
