"""What a model is tried on: the built-in passages as chunks, in a store that goes afterwards."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_store.place import MIN_LIMIT
from cache_store.store import ChunkStore
from engine.api import Engine
from engine.calibration.texts import PASSAGES
from engine.precompute import ChunkWriter
from engine.prefill import Prefiller
from engine.prompt import Prompt, PromptChunk


@dataclass(frozen=True)
class Ground:
    """An engine over a store of its own, which holds the chunks behind the engine's prefix.

    chunks: the built-in passages, in their order.
    """

    engine: Engine
    store: ChunkStore
    prefill: Prefiller
    chunks: tuple[PromptChunk, ...]

    def prompt(self, question: str, numbers: Sequence[int]) -> Prompt:
        """A prompt over the passages of these numbers."""
        return self.engine.prompt(question, [self.chunks[n] for n in numbers])


@contextmanager
def ground(engine: Engine, numbers: Sequence[int] | None = None) -> Iterator[Ground]:
    """Computes the passages of these numbers (default: all) into a temporary store.

    Raises OSError where the system's folder for temporary files takes no store.
    """
    chunks = tuple(engine.chunk(passage.chunk, passage.title) for passage in PASSAGES)
    wanted = [chunks[n] for n in (range(len(chunks)) if numbers is None else numbers)]
    spec, prefix = engine.spec, engine.template.prefix
    needed = sum(
        ChunkStore.predicted_bytes(spec, len(c.token_ids), len(prefix)) for c in wanted
    ) + ChunkStore.predicted_bytes(spec, len(prefix), 0)
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-calibrate-") as folder,
        ChunkStore.open(Path(folder) / "store", limit_bytes=2 * needed + MIN_LIMIT) as store,
    ):
        if wanted:
            ChunkWriter(engine.model, store, spec, prefix).write_missing(wanted)
        yield Ground(engine, store, Prefiller(engine.model, store, spec), chunks)
