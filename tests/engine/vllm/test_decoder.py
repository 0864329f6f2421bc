"""vLLM's layers as a decoder: modules of the same shape stand for vLLM's own."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from engine.model import Decoder
from engine.vllm.decoder import VllmDecoder
from engine.weights import LayerWeights
from tests.engine.blend_world import make_world
from tests.engine.tiny_models import TINY


def product(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., Any]:
    return lambda x: (F.linear(x, weight, bias), None)


def joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def layer_of(decoder: Decoder, w: LayerWeights) -> Any:
    def norm(weight: torch.Tensor | None) -> Any:
        return None if weight is None else SimpleNamespace(weight=weight)

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)

    c = decoder.config
    qkv = joined([w.q, w.k, w.v])
    assert qkv is not None
    return SimpleNamespace(
        input_layernorm=norm(w.input_norm),
        post_attention_layernorm=norm(w.post_norm),
        self_attn=SimpleNamespace(
            qkv_proj=product(qkv, joined([w.q_bias, w.k_bias, w.v_bias])),
            o_proj=product(w.o, w.o_bias),
            attn=SimpleNamespace(num_heads=c.heads, num_kv_heads=c.kv_heads),
            q_norm=norm(w.q_norm),
            k_norm=norm(w.k_norm),
        ),
        mlp=mlp,
    )


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, VllmDecoder]:
    tiny = next(tiny for tiny in TINY if tiny.name == request.param)
    plain = make_world(tiny, tmp_path).model
    layers = [layer_of(plain, w) for w in plain.weights.layers]
    body = SimpleNamespace(layers=layers, embed_tokens=lambda ids: plain.embed(ids))
    model = cast(torch.nn.Module, SimpleNamespace(model=body))
    return plain, VllmDecoder(plain.config, model, plain.device, plain.dtype)


@pytest.mark.parametrize("tokens", [1, 3])
@torch.inference_mode()
def test_queries_may_be_asked_for_again(pair: tuple[Decoder, VllmDecoder], tokens: int) -> None:
    """As a policy does that compares attention's outputs; one token's parts lie as if alone."""
    plain, vllm = pair
    places = torch.arange(7, 7 + tokens)
    rows = plain.rope.tables(32, 32)[places]
    x = plain.embed(places + 5)
    normed = plain.norm_in(1, x)
    k, v = plain.keys_values(1, normed)
    expected = [k, v, plain.rotated(1, plain.queries(1, normed), rows).clone()]
    normed = vllm.norm_in(1, x)
    k, v = vllm.keys_values(1, normed)
    for _ in range(2):
        q = vllm.rotated(1, vllm.queries(1, normed), rows)
        for ours, theirs in zip((k, v, q), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@torch.inference_mode()
def test_many_rows_go_through_products_in_slices(pair: tuple[Decoder, VllmDecoder]) -> None:
    plain, vllm = pair
    rows = torch.randn(11, plain.config.hidden, generator=torch.Generator().manual_seed(1))
    attention = torch.randn(11, plain.config.heads * plain.config.head_dim)
    seen: list[int] = []

    def watched(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> Any:
            seen.append(len(x))
            return part(x)

        return call

    for layer in vllm._layers:
        layer.mlp = watched(layer.mlp)
        for name in ("qkv_proj", "o_proj"):
            setattr(layer.self_attn, name, watched(getattr(layer.self_attn, name)))

    def made(decoder: Decoder) -> list[torch.Tensor]:
        normed = decoder.norm_in(1, rows)
        parts = [*decoder.keys_values(1, normed), decoder.queries(1, normed)]
        return [part.clone() for part in (*parts, decoder.finish(1, rows.clone(), attention))]

    expected, vllm.most_rows = made(plain), 4
    for ours, theirs in zip(made(vllm), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sorted(seen) == [3] * 3 + [4] * 6
