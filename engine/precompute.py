"""A chunk's own KV: computed behind one context and nothing else."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cache_store.errors import UsageError
from cache_store.keys import KVSpec, entry_key, group_key
from engine.codec import Buffers, Codec
from engine.forward import forward
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.packed import forward_packed
from engine.prompt import PromptChunk, Segment
from engine.sources import KVStore
from engine.timing import synchronize
from engine.write_behind import WriteBehind

OnStored = Callable[[PromptChunk, str], None]

# Tokens computed together. Measured on 2 AVX-512/AMX cores with the default model and chunks of 64
# to 1,024 tokens: 1,024 are an eighth slower, 2,048 up to 8% slower, 8,192 no faster.
BATCH_TOKENS = 4096
CACHE_STEP = 512  # the context is computed again where a longer chunk than ever needs more room


@dataclass(frozen=True)
class Batch:
    """Chunks that were computed together, in one length regime.

    kv: on the host, [layers, 2, tokens, kv_heads, head_dim], K before RoPE and V of all chunks, one
    after the other; where ranks share the model rank 0 has all heads, the others their own. copied:
    when the device has brought it there.
    """

    chunks: tuple[PromptChunk, ...]
    regime: str
    kv: torch.Tensor
    copied: torch.cuda.Event | None

    def layers(self, codec: Codec) -> Iterator[tuple[PromptChunk, list[Buffers]]]:
        """Each chunk with, per layer, its K and V as they are stored. Raises as `Codec.encode`."""
        if self.copied is not None:
            self.copied.synchronize()
        start = 0
        for chunk in self.chunks:
            end = start + len(chunk.token_ids)
            yield chunk, [codec.encode(kv[0, start:end], kv[1, start:end]) for kv in self.kv]
            start = end


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

    def batch(self, chunks: Sequence[PromptChunk], space: torch.Tensor | None = None) -> Batch:
        """Computes chunks of one length regime together.

        space: host memory for their KV, flat, in the model's dtype, at least `batch_values` long.
        """
        c, tokens = self.model.config, sum(len(chunk.token_ids) for chunk in chunks)
        size = self.batch_values(tokens)
        space = self.new_space(tokens) if space is None else space
        kv = space[:size].view(c.layers, 2, tokens, c.kv_heads, c.head_dim)
        on_cuda = self.model.device.type == "cuda"

        def keep(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            kv[layer, 0].copy_(k, non_blocking=on_cuda)
            kv[layer, 1].copy_(v, non_blocking=on_cuda)

        longest = max(len(chunk.token_ids) for chunk in chunks)
        length = len(self.context) + longest
        cache, tables = self._context_cache(length), self.model.rope.tables(length)
        forward_packed(self.model, cache, [chunk.token_ids for chunk in chunks], tables, keep)
        copied = None
        if on_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self.model.device))
        if self.model.ranks.size > 1:
            synchronize(self.model.device)
            kv = self.model.ranks.whole(kv)
        return Batch(tuple(chunks), self.regime(longest), kv, copied)

    def batch_values(self, tokens: int) -> int:
        """Numbers that the K and V of so many tokens are."""
        c = self.model.config
        return c.layers * 2 * tokens * c.kv_heads * c.head_dim

    def new_space(self, tokens: int) -> torch.Tensor:
        """Host memory for the KV of so many tokens, where the device copies to it fast."""
        on_cuda = self.model.device.type == "cuda"
        return torch.empty(self.batch_values(tokens), dtype=self.model.dtype, pin_memory=on_cuda)

    def _context_cache(self, length: int) -> KVCache:
        """A cache that holds the context in the regime of the whole, with room for `length`."""
        cache, regime = self._cache, self.model.rope.regime(length)
        if cache is None or cache.capacity < length or self._regime != regime:
            cache = self.model.new_cache(-(-length // CACHE_STEP) * CACHE_STEP)
            if self.context:
                tables = self.model.rope.tables(length)
                forward(self.model, cache, self.context, tables, last=0)
            self._cache, self._regime = cache, regime
        cache.length = len(self.context)
        return cache


class ChunkWriter:
    """Computes what a store lacks behind one context, and stores it.

    prefix: what prompts begin with, whose own KV is stored besides; None: the context.
    """

    def __init__(
        self,
        model: Decoder,
        store: KVStore,
        spec: KVSpec,
        context: Sequence[int],
        prefix: Sequence[int] | None = None,
    ) -> None:
        self.store, self.spec = store, spec
        self.prefix = tuple(context if prefix is None else prefix)
        self._precomputer = Precomputer(model, context)

    @property
    def model(self) -> Decoder:
        return self._precomputer.model

    @property
    def context(self) -> tuple[int, ...]:
        return self._precomputer.context

    def place(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Group and key that this chunk's KV behind this very context has."""
        group = group_key(self.spec, token_ids)
        regime = self._precomputer.regime(len(token_ids))
        return group, entry_key(group, self.context, regime)

    def held(self, token_ids: Sequence[int]) -> str | None:
        """The key of this chunk's KV behind this very context, if the store has it."""
        regime = self._precomputer.regime(len(token_ids))
        if not self.store.contains(self.spec, token_ids, self.context, regime):
            return None
        return entry_key(group_key(self.spec, token_ids), self.context, regime)

    def write(
        self, token_ids: Sequence[int], chunk_id: str | None = None, *, saved: bool = False
    ) -> str:
        """Computes one chunk's KV and stores it; returns the entry's key.

        saved: for a prompt, see `ChunkStore.put`. Raises StoreFullError, UsageError for a chunk
        longer than the model's context.
        """
        keys: list[str] = []
        chunk = PromptChunk(tuple(token_ids), chunk_id)
        self._check(chunk)
        batch = self._precomputer.batch([chunk])
        for _ in self._stored(batch, lambda _, key: keys.append(key), saved):
            pass
        return keys[0]

    def write_all(
        self, chunks: Iterable[PromptChunk], on_stored: OnStored, *, saved: bool = False
    ) -> None:
        """Computes chunks in batches, and stores each while the next is computed.

        on_stored is told of each chunk that is stored and its entry's key, in order, in another
        thread. Interrupted, it ends once the chunk that is being written is stored. Raises
        StoreFullError, UsageError for a chunk longer than the model's context; what was stored
        until then stays.
        """
        spaces: dict[int, torch.Tensor] = {}
        with WriteBehind(depth=1) as behind:
            for number, batch in enumerate(self.batches(chunks)):
                turn = number % 2  # one is written while the other is computed
                tokens = sum(len(chunk.token_ids) for chunk in batch)
                if turn not in spaces or len(spaces[turn]) < self._precomputer.batch_values(tokens):
                    spaces[turn] = self._precomputer.new_space(max(tokens, BATCH_TOKENS))
                computed = self._precomputer.batch(batch, spaces[turn])
                behind.submit(self._stored(computed, on_stored, saved))

    def batches(self, chunks: Iterable[PromptChunk]) -> Iterator[list[PromptChunk]]:
        """Chunks in order, as many at a time as are computed together: of one length regime, and
        of BATCH_TOKENS in all where one alone isn't longer. Raises UsageError as `write` does."""
        batch: list[PromptChunk] = []
        tokens, regime = 0, ""
        for chunk in chunks:
            self._check(chunk)
            size = len(chunk.token_ids)
            own = self._precomputer.regime(size)
            if batch and (tokens + size > BATCH_TOKENS or own != regime):
                yield batch
                batch, tokens = [], 0
            batch.append(chunk)
            tokens, regime = tokens + size, own
        if batch:
            yield batch

    def _check(self, chunk: PromptChunk) -> None:
        limit = self._precomputer.model.config.context - len(self.context)
        if len(chunk.token_ids) >= limit:
            raise UsageError(
                f"a chunk of {len(chunk.token_ids)} tokens does not fit the model's context",
                f"with its prefix it takes chunks under {limit} tokens",
            )

    def _stored(self, batch: Batch, on_stored: OnStored, saved: bool) -> Iterator[None]:
        """Stores a batch, a chunk a step."""
        for chunk, layers in batch.layers(Codec.of(self.spec, self.model.dtype)):
            key = self.store.put(
                self.spec,
                chunk.token_ids,
                self.context,
                batch.regime,
                layers,
                chunk_id=chunk.chunk_id or "",
                saved=saved,
            )
            on_stored(chunk, key)
            yield

    def write_missing(self, chunks: Iterable[PromptChunk | Segment], *, saved: bool = False) -> int:
        """Stores the prefix and those of the chunks that are not there; counts the latter.

        saved: for a prompt, see `ChunkStore.put`. Raises StoreFullError."""
        _, missing = self.missing(chunks)
        if missing:
            self.write_prefix(saved=saved)
            self.write_all(missing, lambda chunk, key: None, saved=saved)
        return len(missing)

    def missing(self, chunks: Iterable[PromptChunk | Segment]) -> tuple[bool, list[PromptChunk]]:
        """Whether the prefix is not there, and which of the chunks; each counts once."""
        wanted = {chunk.token_ids: chunk for chunk in chunks if chunk.token_ids}
        places = [self.place(ids) for ids in wanted]
        alone = ChunkWriter(self.model, self.store, self.spec, ())
        if self.prefix:
            places.insert(0, alone.place(self.prefix))
        self.store.bring(places)
        missing = [
            PromptChunk(ids, chunk.chunk_id)
            for ids, chunk in wanted.items()
            if self.held(ids) is None
        ]
        return bool(self.prefix) and alone.held(self.prefix) is None, missing

    def compute(self, chunks: Sequence[PromptChunk]) -> Batch:
        """One of the `batches`, computed."""
        return self._precomputer.batch(chunks)

    def keep(self, batch: Batch, *, saved: bool = False) -> None:
        """Stores what `compute` gave. Raises StoreFullError."""
        for _ in self._stored(batch, lambda chunk, key: None, saved):
            pass

    def write_prefix(self, *, saved: bool = False) -> str:
        """Stores the prefix's own KV, itself behind nothing, unless it is there.

        Returns the entry's key ("" for an empty prefix, which has none).
        """
        if not self.prefix:
            return ""
        alone = ChunkWriter(self.model, self.store, self.spec, ())
        return alone.held(self.prefix) or alone.write(self.prefix, saved=saved)
