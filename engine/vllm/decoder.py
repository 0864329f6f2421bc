"""vLLM's model as the decoder that blending works on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from cache_store.errors import UsageError
from engine.config import ModelConfig
from engine.model import Decoder
from engine.ranks import ALONE, Ranks
from engine.rope import Tables

MOST_ROWS = 8192
_PARTS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "self_attn.attn",
    "mlp",
)


class VllmDecoder(Decoder):
    """A `Decoder` whose products are vLLM's own layers, with their quantisation, tensor
    parallelism and kernels; norms, RoPE and attention over the staged KV are the engine's.

    Where the model is split over tensor-parallel ranks this is one rank's share: `config.heads`,
    `kv_heads` and `intermediate` count the rank's own; hidden states are whole on every rank. Every
    rank must make the same calls.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """config: of the whole model. model: as vLLM loaded it. most_rows: what vLLM computes at
        most in a step. Raises UsageError for a model whose layers don't have the parts that are
        needed here."""
        self.ranks, self.most_rows = ranks, most_rows
        self._body: Any = getattr(model, "model", None)
        self._model: Any = model
        self._layers: Sequence[Any] = list(getattr(self._body, "layers", ()))
        name = type(model).__name__
        if len(self._layers) != config.layers:
            raise UsageError(f"{name}: {len(self._layers)} layers found, not {config.layers}")
        for part in _PARTS + (("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()):
            if any(_part(layer, part) is None for layer in self._layers):
                raise UsageError(f"vLLM's {name} has no {part}, which blending needs")
        first = self._layers[0].self_attn
        heads, kv_heads = first.attn.num_heads, first.attn.num_kv_heads
        split = config.heads // heads
        self.weights = None  # type: ignore[assignment]  # they are vLLM's
        self._set_up(
            replace(
                config,
                heads=heads,
                kv_heads=kv_heads,
                intermediate=config.intermediate // split,
            ),
            device,
            dtype,
        )
        native = self.kernels.name == "native"
        self._splits_mlp = native and all(_is_plain_mlp(layer.mlp) for layer in self._layers)
        self._qkv: tuple[torch.Tensor, torch.Tensor] | None = None  # of what input, and what

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self._body.embed_tokens(token_ids)
        return x

    def norm_in(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        weight = self._layers[layer].input_layernorm.weight.data
        self._qkv = None
        return self.kernels.norm(x, weight, self.config.rms_norm_eps, self._kept("norm", x.shape))

    def keys_values(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """These may be parts of a larger tensor: their tokens are then not one after the other."""
        c = self.config
        _, k, v = self._split(self._projected(layer, normed))
        k, v = (x.view(-1, c.kv_heads, c.head_dim) for x in (k, v))
        if c.qk_norm:
            k = self._head_norm(k.contiguous(), self._layers[layer].self_attn.k_norm.weight.data)
        return k, v

    def queries(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        c = self.config
        q, _, _ = self._split(self._projected(layer, normed))
        q = q.view(-1, c.heads, c.head_dim)
        if c.qk_norm:
            q = self._head_norm(q.contiguous(), self._layers[layer].self_attn.q_norm.weight.data)
        return q

    def rotated(self, layer: int, x: torch.Tensor, rows: Tables) -> torch.Tensor:
        """In place only where x's memory is its own."""
        turned = rows.layer(layer)
        if turned is None or x.is_contiguous():
            return super().rotated(layer, x.contiguous(), rows)
        return self.kernels.place(x, turned, self._kept("q", x.shape))

    def finish(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        parts, self._qkv = self._layers[layer], None  # room for what the MLP holds
        weight = parts.post_attention_layernorm.weight.data
        slices = torch.split(x, self.most_rows), torch.split(attention, self.most_rows)
        for rows, attended in zip(*slices, strict=True):
            projected = parts.self_attn.o_proj(attended)[0]
            kept = self._kept("norm", rows.shape)
            normed = self.kernels.add_norm(rows, projected, weight, self.config.rms_norm_eps, kept)
            rows.add_(self._mlp(parts.mlp, normed))
        return x

    def _mlp(self, mlp: Any, normed: torch.Tensor) -> torch.Tensor:
        """A layer's MLP. On a CPU torch takes as long for the activation alone as for a product."""
        if not self._splits_mlp:
            return cast(torch.Tensor, mlp(normed))
        pairs = mlp.gate_up_proj(normed)[0]
        kept = self._kept("gate", (pairs.shape[0], pairs.shape[1] // 2))
        gate = self.kernels.gate_pairs(pairs, "silu", kept)
        return cast(torch.Tensor, mlp.down_proj(gate)[0])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As vLLM computes them, on every rank."""
        weight = self._body.norm.weight.data
        kept = self._kept("norm", x.shape)
        normed = self.kernels.norm(x, weight, self.config.rms_norm_eps, kept)
        out: torch.Tensor = self._model.compute_logits(normed)
        return out.float()

    def _projected(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Q, K and V side by side; kept, for they are asked for one after the other."""
        if self._qkv is None or self._qkv[0] is not normed:
            project = self._layers[layer].self_attn.qkv_proj
            if len(normed) <= self.most_rows:
                made = project(normed)[0]
            else:
                c = self.config
                width = (c.heads + 2 * c.kv_heads) * c.head_dim
                made = normed.new_empty(len(normed), width)
                slices = torch.split(normed, self.most_rows), torch.split(made, self.most_rows)
                for rows, out in zip(*slices, strict=True):
                    out.copy_(project(rows)[0])
            self._qkv = normed, made
        return self._qkv[1]

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = self.config
        kv = c.kv_heads * c.head_dim
        if len(qkv) == 1:  # whose parts are contiguous, so that norms and RoPE work in place
            qkv = qkv.clone()
        return torch.split(qkv, [c.heads * c.head_dim, kv, kv], dim=-1)


def _is_plain_mlp(mlp: torch.nn.Module) -> bool:
    """Whether it is down(silu(gate) * up) and nothing else."""
    parts = dict(mlp.named_children())
    return (
        parts.keys() == {"gate_up_proj", "down_proj", "act_fn"}
        and type(parts["act_fn"]).__name__ == "SiluAndMul"
    )


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
