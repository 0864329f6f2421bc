"""Slow, separate accounts of what policies look at and of transfer, for the tiny models.

Nothing of the engine's own steps is used: weights, RoPE's angles and stored KV are taken as they
are, and the rest is plain torch, token by token, with the masks written out.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.prefill import Prefilled
from engine.prompt import Prompt
from tests.engine.blend_world import World


@dataclass
class StoredKV:
    """Of one prompt: K before RoPE and V of its stored tokens, each [layers, kv_heads, head_dim]
    by position; `exact`, `hits`: positions of the former and of the other stored ones."""

    k: dict[int, torch.Tensor]
    v: dict[int, torch.Tensor]
    exact: set[int]
    hits: list[int]
    chunks: list[range]


def stored_kv(world: World, prompt: Prompt) -> StoredKV:
    found = StoredKV({}, {}, set(), [], [])
    c = world.model.config
    for segment in prompt.segments:
        match = world.store.find(
            world.spec,
            segment.token_ids,
            prompt.before(segment),
            regime=world.model.rope.regime(len(prompt.token_ids)),
        )
        if match is None or not (match.exact or segment.kind == "chunk"):
            continue
        span = range(segment.start, segment.end)
        with world.store.open_entry(match.key) as entry:
            layers = [
                [
                    torch.frombuffer(bytearray(part), dtype=torch.float32).view(
                        -1, c.kv_heads, c.head_dim
                    )
                    for part in entry.layer(layer)
                ]
                for layer in range(c.layers)
            ]
        for row, position in enumerate(span):
            found.k[position] = torch.stack([k[row] for k, _ in layers])
            found.v[position] = torch.stack([v[row] for _, v in layers])
        if match.exact:
            found.exact.update(span)
        else:
            found.hits.extend(span)
            found.chunks.append(span)
    return found


class Slow:
    """A decoder of its own, float32, one token at a time."""

    def __init__(self, world: World, length: int) -> None:
        self.config, self.weights = world.model.config, world.model.weights
        self.embed_scale = self.config.embed_scale
        self.tables = world.model.rope.tables(length)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * weight

    def angles(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """cos and sin, each of half the dimensions that turn; scaled as the model has it."""
        rows = self.tables.layer(layer)
        if rows is None:
            return None
        half = rows[0].shape[1] // 2
        return rows[0][position, :half], rows[1][position, half:]

    def turn(self, layer: int, position: int, x: torch.Tensor) -> torch.Tensor:
        """[heads, head_dim] at its position."""
        angles = self.angles(layer, position)
        if angles is None:
            return x
        (cos, sin), half = angles, len(angles[0])
        a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], 1)

    def embed(self, token: int) -> torch.Tensor:
        return self.weights.embed[token] * self.embed_scale

    def projected(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k (neither turned) and v of one token, each [heads, head_dim]."""
        w, c = self.weights.layers[layer], self.config
        y = self.norm(x, w.input_norm)
        q, k, v = (
            F.linear(y, weight, bias).view(-1, c.head_dim)
            for weight, bias in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias))
        )
        q = q if w.q_norm is None else self.norm(q, w.q_norm)
        k = k if w.k_norm is None else self.norm(k, w.k_norm)
        return q, k, v

    def shares(self, layer: int, position: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """What one turned query [heads, head_dim] gives each of the turned keys
        [positions, kv_heads, head_dim]: [heads, positions], 0 where it may not look."""
        keys = k.repeat_interleave(self.config.heads // self.config.kv_heads, 1)
        scores = torch.einsum("hd,nhd->hn", q, keys) * self.config.head_dim**-0.5
        seen = torch.arange(len(k)) <= position
        window = self.config.windows[layer]
        if window is not None:
            seen &= torch.arange(len(k)) > position - window
        return scores.masked_fill(~seen, -torch.inf).softmax(1)

    def output(
        self, layer: int, position: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attention's output [heads * head_dim]."""
        values = v.repeat_interleave(self.config.heads // self.config.kv_heads, 1)
        shares = self.shares(layer, position, q, k)
        return torch.einsum("hn,nhd->hd", shares, values).flatten()

    def finish(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        w = self.weights.layers[layer]
        y = F.linear(attention, w.o, w.o_bias)
        x = x + (y if w.o_norm is None else self.norm(y, w.o_norm))
        y = self.norm(x, w.post_norm)
        gate = F.linear(y, w.gate, w.gate_bias)
        tanh = self.config.activation == "gelu_pytorch_tanh"
        gate = F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)
        y = F.linear(gate * F.linear(y, w.up, w.up_bias), w.down, w.down_bias)
        return x + (y if w.down_norm is None else self.norm(y, w.down_norm))


@dataclass
class Seen:
    """KV of every position, K turned, as a slow run has it; by layer [N, kv_heads, head_dim]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


def question_scores(
    world: World,
    prompt: Prompt,
    layers: range,
    *,
    heads: str = "sum",
    weight: str = "value",
) -> dict[int, float]:
    """What policy question must make of each hit: position -> score.

    Everything that isn't stored runs over stored KV; of it, the suffix asks.
    """
    slow, n = Slow(world, len(prompt.token_ids)), len(prompt.token_ids)
    kv = stored_kv(world, prompt)
    x = {p: slow.embed(prompt.token_ids[p]) for p in range(n) if p not in kv.k}
    asking = range(prompt.segments[-1].start, n)
    totals = torch.zeros(len(kv.hits))
    for layer in range(layers.stop):
        queries, keys, values = {}, [], []
        for p in range(n):
            if p in x:
                q, k, v = slow.projected(layer, x[p])
                queries[p] = slow.turn(layer, p, q)
            else:
                k, v = kv.k[p][layer], kv.v[p][layer]
            keys.append(slow.turn(layer, p, k))
            values.append(v)
        k_all, v_all = torch.stack(keys), torch.stack(values)
        if layer in layers:
            mass = torch.stack([slow.shares(layer, p, queries[p], k_all) for p in asking]).sum(0)
            if weight == "value":
                norms = v_all.square().sum(-1).sqrt()  # [N, kv_heads]
                shared = slow.config.heads // slow.config.kv_heads
                mass = mass * norms.repeat_interleave(shared, 1).T
            mine = mass[:, kv.hits]
            here = mine.sum(0) if heads == "sum" else mine.max(0).values
            totals += here / here.sum()
        for p in x:
            x[p] = slow.finish(layer, x[p], slow.output(layer, p, queries[p], k_all, v_all))
    return dict(zip(kv.hits, totals.tolist(), strict=True))


def recomputed(
    world: World, prompt: Prompt, chosen: list[list[int]], *, moved: bool, full_until: int = -1
) -> Seen:
    """The KV cache a blend must leave behind, given which hits get fresh KV at each layer.

    Hits that don't are as they were stored, or, with `moved`, moved by what the fresh ones of their
    chunk show, above layer max(full_until, 0).
    """
    slow, n = Slow(world, len(prompt.token_ids)), len(prompt.token_ids)
    kv = stored_kv(world, prompt)
    x = {p: slow.embed(prompt.token_ids[p]) for p in range(n) if p not in kv.exact}
    result = Seen([], [])
    for layer in range(slow.config.layers):
        mine = set(chosen[layer])
        x = {p: h for p, h in x.items() if p not in kv.k or p in mine}
        queries, keys, values = {}, {}, {}
        for p in range(n):
            if p in x:
                q, keys[p], values[p] = slow.projected(layer, x[p])
                queries[p] = slow.turn(layer, p, q)
            else:
                keys[p], values[p] = kv.k[p][layer], kv.v[p][layer]
        if moved and layer > max(full_until, 0):
            _move(kv, layer, mine, keys, values)
        k_all = torch.stack([slow.turn(layer, p, keys[p]) for p in range(n)])
        v_all = torch.stack([values[p] for p in range(n)])
        result.k.append(k_all)
        result.v.append(v_all)
        for p in x:
            x[p] = slow.finish(layer, x[p], slow.output(layer, p, queries[p], k_all, v_all))
    return result


def _move(
    kv: StoredKV,
    layer: int,
    fresh: set[int],
    keys: dict[int, torch.Tensor],
    values: dict[int, torch.Tensor],
    block: int = 64,
) -> None:
    """K and V of what isn't fresh, by the words of `engine.transfer`: 5 more like the chunk, 10
    more that don't deviate, by the share of the chunk that is left."""
    for chunk in kv.chunks:
        mine = [p for p in chunk if p in fresh]
        for now, stored in ((keys, kv.k), (values, kv.v)):
            off = {p: now[p] - stored[p][layer] for p in mine}
            if not off:
                continue
            of_chunk = torch.stack(list(off.values())).sum(0) / (len(mine) + 10)
            left = (len(chunk) - len(mine)) / len(chunk)
            for first in range(chunk.start, chunk.stop, block):
                here = range(first, min(first + block, chunk.stop))
                near = [off[p] for p in here if p in off]
                total = torch.stack(near).sum(0) if near else torch.zeros_like(of_chunk)
                shift = left * (total + 5 * of_chunk) / (len(near) + 5)
                for p in here:
                    if p not in fresh:
                        now[p] = stored[p][layer] + shift


def kv_of(run: Prefilled, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K (turned) and V of a run at one layer, each [N, kv_heads, head_dim]."""
    n = run.cache.length
    return run.cache.k[layer, :, :n].transpose(0, 1), run.cache.v[layer, :, :n].transpose(0, 1)
