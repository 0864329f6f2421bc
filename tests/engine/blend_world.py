"""A tiny model, a store and prompts of random ids: what the blending tests play with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from cache_store.keys import KVSpec
from cache_store.store import ChunkStore
from engine.codec import Codec
from engine.model import Decoder
from engine.options import BlendOptions
from engine.precompute import ChunkWriter
from engine.prefill import Prefilled, Prefiller
from engine.prompt import Prompt, PromptChunk, lay_out
from tests.engine.tiny_models import Tiny, build


@dataclass
class World:
    """`prefill` and `full` answer the same question in two ways: ours and the oracle's."""

    oracle: transformers.PreTrainedModel
    model: Decoder
    store: ChunkStore
    spec: KVSpec
    prefix: tuple[int, ...]
    chunks: tuple[PromptChunk, ...]
    separator: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def writer(self) -> ChunkWriter:
        return ChunkWriter(self.model, self.store, self.spec, self.prefix)

    @property
    def codec(self) -> Codec:
        return Codec.of(self.spec, self.model.dtype)

    def ingest(self, chunks: Sequence[int] | None = None) -> None:
        """Stores the prefix and the chunks of those numbers (default: all)."""
        writer = self.writer
        writer.write_prefix()
        for index in range(len(self.chunks)) if chunks is None else chunks:
            writer.write(self.chunks[index].token_ids)

    def prompt(self, order: Sequence[int], suffix: Sequence[int] | None = None) -> Prompt:
        chunks = [self.chunks[index] for index in order]
        return lay_out(self.prefix, chunks, self.separator, suffix or self.suffix)

    def prefill(self, prompt: Prompt, **options: object) -> Prefilled:
        given = {"min_tokens": 0, "policy": "value", **options}
        if "indices" in options:
            given["policy"] = "explicit"
        chosen = BlendOptions.of(**given)  # type: ignore[arg-type]
        return Prefiller(self.model, self.store, self.spec)(prompt, chosen, room=8)

    def full(self, prompt: Prompt) -> torch.Tensor:
        """The oracle's logits after the prompt's last token, float32 [vocab]."""
        rotary = self.oracle.model.rotary_emb  # dynamic RoPE remembers longer prompts; forget them
        self.oracle.model.rotary_emb = type(rotary)(self.oracle.config)
        with torch.no_grad():
            return self.oracle(torch.tensor([prompt.token_ids])).logits[0, -1]

    def kv(self, run: Prefilled) -> tuple[torch.Tensor, torch.Tensor]:
        """Filled part of the KV cache: K and V, [layers, kv_heads, N, head_dim]."""
        n = run.cache.length
        return run.cache.k[:, :, :n], run.cache.v[:, :, :n]


def ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 300, (count,), generator=generator).tolist())


def make_world(
    tiny: Tiny,
    path: Path,
    *,
    sizes: Sequence[int] = (30, 21, 34, 25),
    prefix: int = 9,
    separator: int = 2,
    suffix: int = 7,
) -> World:
    oracle = build(tiny, path / "model")
    model = Decoder.load(path / "model", "cpu", "fp32")
    c = model.config
    return World(
        oracle=oracle,
        model=model,
        store=ChunkStore.open(path / "store", limit_bytes=10**9),
        spec=KVSpec("m" * 64, "t" * 64, c.layers, c.kv_heads, c.head_dim, "fp32"),
        prefix=ids(prefix, 1),
        chunks=tuple(
            PromptChunk(ids(size, 10 + i), f"{i:064x}", f"doc{i}") for i, size in enumerate(sizes)
        ),
        separator=ids(separator, 2),
        suffix=ids(suffix, 3),
    )
