"""What a model is tried on: the built-in passages as chunks, in a store that goes afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cache_store.keys import KVSpec
from cache_store.store import ChunkStore
from engine.api import Engine
from engine.bench.layout import temporary_store
from engine.calibration.texts import PASSAGES
from engine.precompute import ChunkWriter
from engine.prefill import Prefiller
from engine.prompt import Prompt, PromptChunk


@dataclass(frozen=True)
class Ground:
    """An engine over a store of its own, which holds the chunks behind the engine's prefix.

    chunks: the built-in passages, in their order. They are stored as they are computed: what
    quantising costs is no fault of the model's; stored: how KV is stored elsewhere.
    """

    engine: Engine
    store: ChunkStore
    prefill: Prefiller
    chunks: tuple[PromptChunk, ...]
    stored: KVSpec

    def prompt(self, question: str, numbers: Sequence[int]) -> Prompt:
        """A prompt over the passages of these numbers."""
        return self.engine.prompt(question, [self.chunks[n] for n in numbers])


@contextmanager
def ground(engine: Engine) -> Iterator[Ground]:
    """Computes the passages into a temporary store.

    Raises CacheblendError where the system's folder for temporary files lacks the room, OSError
    where it takes no store.
    """
    chunks = tuple(engine.chunk(passage.chunk, passage.title) for passage in PASSAGES)
    blueprint = replace(engine.blueprint, kv_dtype=engine.blueprint.dtype)
    plain, prefix = Engine(engine.model, blueprint), engine.template.prefix
    tokens = len(prefix) + sum(len(chunk.token_ids) for chunk in chunks)
    with temporary_store(blueprint, tokens) as store:
        ChunkWriter(engine.model, store, plain.spec, prefix).write_missing(chunks)
        prefill = Prefiller(engine.model, store, plain.spec)
        yield Ground(plain, store, prefill, chunks, engine.spec)
