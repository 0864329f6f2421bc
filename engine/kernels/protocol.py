"""What the decoder asks of its inner loops."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.attention import AttentionPlan
from engine.weights import LayerWeights

Scratch = Callable[[str], torch.Tensor]
"""Memory of a named slot, [T, intermediate], which the next layer's overwrites."""


Run = tuple[int, torch.Tensor, torch.Tensor]
"""K and V [T, kv_heads, head_dim] of tokens from a position on."""


class Kernels(Protocol):
    """What a layer is made of. T tokens; tensors of one dtype and device.

    notes: what is not used here, and why; for people."""

    name: str
    notes: tuple[str, ...]

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        """RMSNorm of x [..., size] over the last dimension, in out's memory or its own.

        weight: [size], of x's type or float32. out may be x."""

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """x += delta, in place; then as `norm`."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """x @ weight.T + bias into out [T, len(weight)]."""

    def gated(
        self, x: torch.Tensor, layer: LayerWeights, activation: str, out: Scratch
    ) -> torch.Tensor:
        """activation(gate projection of x) * up projection of x, [T, intermediate].

        activation: silu, gelu or gelu_pytorch_tanh; out("gate") gives the memory for it."""

    def gate_pairs(self, x: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, into out [T, intermediate], of x [T, 2 * intermediate] that holds
        both, gate first."""

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

    def place_runs(
        self,
        runs: Sequence[Run],
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        """Writes runs of stored K and V to a layer of the KV cache, k_out and v_out
        [kv_heads, N, head_dim], K rotated by its positions' rows of cos and sin (None: not)."""

    def shift(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        spans: torch.Tensor,
        shifts: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Adds to spans of a layer of the KV cache, k and v [kv_heads, N, head_dim], what each
        span's shifts say, float32 [S, 2, kv_heads, head_dim]: first K's, before RoPE, which is
        rotated to each position by its rows of cos and sin (None: not), then V's.

        spans: int64 [2, S] on the host, first positions and those after the last; disjoint. Each
        sum is rounded once."""

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
        """Fresh K before RoPE and V [T, kv_heads, head_dim] less what a layer of the KV cache, k
        and v [kv_heads, N, head_dim], holds at `places`, int64 [T]: summed over groups of tokens,
        K's and V's, float32 [S, 2, kv_heads, head_dim].

        bounds: int64 [S + 1] on the host; group n is tokens [bounds[n], bounds[n + 1]), and may be
        empty. rows: cos and sin that turn the cached K back, [T, dim] (None: as it is)."""

    def norms(self, x: torch.Tensor) -> torch.Tensor:
        """L2 norms over the last dimension of x [heads, N, size], float32 [heads, N]."""

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

    def mass(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        plan: AttentionPlan,
        window: int | None,
        counted: int,
    ) -> torch.Tensor:
        """How much attention each key gets from the plan's last `counted` queries.

        q [T, heads, head_dim] and k [kv_heads, N, head_dim] as `attend` takes them. Returns float32
        [heads, N]: the probabilities by which `attend` weighs the keys, summed over the queries,
        so `counted` a head in all; 0 for keys that none of them sees. Raises ValueError for more
        queries than there are.
        """
