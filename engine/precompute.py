"""A chunk's own KV: computed behind the store's context and nothing else."""

from collections.abc import Iterable, Sequence

import torch

from cache_store.errors import UsageError
from cache_store.keys import KVSpec, entry_key, group_key
from engine.forward import forward
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.prompt import PromptChunk, Segment
from engine.sources import KVStore

LayerBuffers = tuple[memoryview, memoryview]


class Precomputer:
    """Computes chunks behind one context, whose own KV is computed once and kept."""

    def __init__(self, model: Decoder, context: Sequence[int]) -> None:
        self.model = model
        self.context = tuple(context)
        self._cache: KVCache | None = None
        self._regime = ""

    def regime(self, tokens: int) -> str:
        """The length regime a chunk of so many tokens is computed in."""
        return self.model.rope.regime(len(self.context) + tokens)

    def chunk(self, token_ids: Sequence[int]) -> list[LayerBuffers]:
        """Per layer, K before RoPE and V as contiguous bytes [tokens, kv_heads, head_dim]."""
        cache = self._context_cache(len(token_ids))
        length = len(self.context) + len(token_ids)
        return self._run(cache, token_ids, length)

    def prefix(self) -> list[LayerBuffers]:
        """The context's own KV, in the same form."""
        cache = self.model.new_cache(len(self.context))
        return self._run(cache, self.context, len(self.context))

    def _run(self, cache: KVCache, token_ids: Sequence[int], length: int) -> list[LayerBuffers]:
        layers: list[LayerBuffers] = []
        forward(
            self.model,
            cache,
            token_ids,
            self.model.rope.tables(length),
            last=0,
            capture=lambda layer, k, v: layers.append((_buffer(k), _buffer(v))),
        )
        return layers

    def _context_cache(self, tokens: int) -> KVCache:
        """A cache that holds the context in the regime of the whole, with room for the chunk."""
        length = len(self.context) + tokens
        cache, regime = self._cache, self.model.rope.regime(length)
        if cache is None or cache.capacity < length or self._regime != regime:
            cache = self.model.new_cache(length)
            if self.context:
                tables = self.model.rope.tables(length)
                forward(self.model, cache, self.context, tables, last=0)
            self._cache, self._regime = cache, regime
        cache.length = len(self.context)
        return cache


def _buffer(x: torch.Tensor) -> memoryview:
    """A tensor's bytes; bf16 has no buffer type of its own, so it goes as bytes."""
    return x.detach().cpu().contiguous().view(torch.uint8).numpy().data


class ChunkWriter:
    """Computes what a store lacks behind one context, and stores it."""

    def __init__(
        self, model: Decoder, store: KVStore, spec: KVSpec, context: Sequence[int]
    ) -> None:
        self.store, self.spec = store, spec
        self._precomputer = Precomputer(model, context)

    @property
    def context(self) -> tuple[int, ...]:
        return self._precomputer.context

    def holds(self, token_ids: Sequence[int]) -> bool:
        """Whether the store has this chunk's KV behind this very context."""
        regime = self._precomputer.regime(len(token_ids))
        return self.store.contains(self.spec, token_ids, self.context, regime)

    def write(self, token_ids: Sequence[int], chunk_id: str | None = None) -> str:
        """Computes the chunk's KV and stores it; returns the entry's key.

        Raises StoreFullError, UsageError for a chunk longer than the model's context.
        """
        limit = self._precomputer.model.config.context - len(self.context)
        if len(token_ids) >= limit:
            raise UsageError(
                f"a chunk of {len(token_ids)} tokens does not fit the model's context",
                f"with its prefix it takes chunks under {limit} tokens",
            )
        layers = self._precomputer.chunk(token_ids)
        regime = self._precomputer.regime(len(token_ids))
        return self.store.put(
            self.spec, token_ids, self.context, regime, layers, chunk_id=chunk_id or ""
        )

    def write_missing(self, chunks: Iterable[PromptChunk | Segment]) -> int:
        """Stores the context and those of the chunks that are not there; counts the latter."""
        written = 0
        for chunk in chunks:
            if chunk.token_ids and not self.holds(chunk.token_ids):
                self.write_context()
                self.write(chunk.token_ids, chunk.chunk_id)
                written += 1
        return written

    def write_context(self) -> str:
        """Stores the context's own KV, itself behind nothing, unless it is there.

        Returns the entry's key ("" for an empty context, which has none).
        """
        if not self.context:
            return ""
        regime = self._precomputer.regime(0)
        if not self.store.contains(self.spec, self.context, (), regime):
            self.store.put(self.spec, self.context, (), regime, self._precomputer.prefix())
        return entry_key(group_key(self.spec, self.context), (), regime)
