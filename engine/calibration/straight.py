"""The plain way, to compare with: causal attention of chosen tokens over all keys, in float32.

Nothing of placing, planning, attention's kernels or loaders is in it: rotation is worked out from
the declared frequencies in float64, and the mask is a matrix of absolute positions. Embedding,
norms, projections and logits are the decoder's own, with its kernels for float32; what is wrong in
them alike for all types isn't found by comparing with this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from engine.model import Decoder
from engine.rope import inverse_frequencies
from engine.weights import LayerWeights, Weights


@dataclass(frozen=True)
class LayersKV:
    """K before RoPE and V of every position, float32 [layers, T, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def join(cls, parts: "Sequence[LayersKV]") -> "LayersKV":
        """Parts one after the other."""
        return cls(torch.cat([p.k for p in parts], 1), torch.cat([p.v for p in parts], 1))

    def rows(self, start: int, end: int | None = None) -> "LayersKV":
        return LayersKV(self.k[:, start:end], self.v[:, start:end])


@dataclass(frozen=True)
class StraightRun:
    """What came of a run. kv: of every position as the last tokens saw it; logits: float32
    [rows, vocab] of the last tokens."""

    kv: LayersKV
    logits: torch.Tensor


class Straight:
    """A model's own weights in float32, one layer at a time, on its device."""

    def __init__(self, model: Decoder) -> None:
        weights, c = model.weights, model.config
        embed = weights.embed.float()
        head = embed if weights.head is weights.embed else weights.head.float()
        layers = cast(Any, _WideLayers(weights.layers))
        self.decoder = Decoder(c, Weights(embed, layers, weights.norm.float(), head))

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Sequence[int],
        *,
        computed: Sequence[Sequence[int]] | None = None,
        stored: LayersKV | None = None,
        rows: int = 1,
    ) -> StraightRun:
        """Runs a sequence from position 0 on.

        computed: at each layer the positions that get fresh K and V, none added on the way; the
        last `rows` tokens are among them. `stored` has the K and V of the others. None: all.
        """
        d, c, total = self.decoder, self.decoder.config, len(token_ids)
        everything = list(range(total))
        computed = computed or [everything] * c.layers
        at: Sequence[int] = computed[0]
        x = d.embed(torch.tensor(token_ids, device=d.device)[at])
        keys, values = [], []
        for layer in range(c.layers):
            if len(computed[layer]) < len(at):
                stays = set(computed[layer])
                x = x[[index for index, p in enumerate(at) if p in stays]]
                at = computed[layer]
            normed = d.norm_in(layer, x)
            k, v = (_merged(new, at, total) for new in d.keys_values(layer, normed))
            if stored is not None:
                old = sorted(set(everything) - set(at))
                k[old], v[old] = stored.k[layer][old], stored.v[layer][old]
            keys.append(k)
            values.append(v)
            q = d.queries(layer, normed).clone()
            q, turned = self.turn(layer, q, at, total), self.turn(layer, k, everything, total)
            x = d.finish(layer, x, self._attention(layer, q, turned, v, at))
        return StraightRun(LayersKV(torch.stack(keys), torch.stack(values)), d.logits(x[-rows:]))

    def turn(self, layer: int, x: torch.Tensor, at: Sequence[int], total: int) -> torch.Tensor:
        """Q or K [T, heads, head_dim] rotated to positions `at` of a sequence of `total` tokens."""
        c = self.decoder.config
        if not c.rope_layers[layer]:
            return x
        rope = c.local_rope if c.local_rope and c.windows[layer] else c.rope
        dim = int(c.head_dim * c.rope.partial)
        frequencies, scale = inverse_frequencies(rope, dim, c.max_positions, total)
        places = torch.tensor(at, dtype=torch.float64)
        angles = places[:, None, None] * frequencies.double()
        cos = (angles.cos() * scale).float().to(x.device)
        sin = (angles.sin() * scale).float().to(x.device)
        one, other = x[..., : dim // 2], x[..., dim // 2 : dim]
        return torch.cat([one * cos - other * sin, other * cos + one * sin, x[..., dim:]], -1)

    def _attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Sequence[int]
    ) -> torch.Tensor:
        c = self.decoder.config
        k = k.repeat_interleave(c.heads // c.kv_heads, dim=1)
        v = v.repeat_interleave(c.heads // c.kv_heads, dim=1)
        # Where a model declares another scale, that is in the weights of its q-norm.
        scores = torch.einsum("thd,nhd->htn", q, k) * c.head_dim**-0.5
        query, key = torch.tensor(at, device=q.device)[:, None], torch.arange(len(k)).to(q.device)
        hidden = key > query
        window = c.windows[layer]
        if window is not None:
            hidden |= key <= query - window
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htn,nhd->thd", shares, v).flatten(1)


class _WideLayers(Sequence[LayerWeights]):
    """Layers in float32, made when they are asked for; the last one is kept."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerWeights]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if self._last is None or self._last[0] != index:
            layer = self._layers[index]
            wide = {f.name: _wide(getattr(layer, f.name)) for f in fields(layer)}
            self._last = (index, LayerWeights(**wide))
        return self._last[1]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


def _merged(rows: torch.Tensor, at: Sequence[int], total: int) -> torch.Tensor:
    """Rows at their positions, [total, ...]; the rest is zero."""
    out = rows.new_zeros(total, *rows.shape[1:])
    out[list(at)] = rows
    return out
