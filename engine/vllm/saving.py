"""Chunks that prompts missed, computed and stored by all ranks together."""

import json
from collections.abc import Iterable, Sequence
from functools import partial

from engine.precompute import Batch, ChunkWriter
from engine.prompt import PromptChunk
from engine.vllm.lockstep import together


def save_missing(writer: ChunkWriter, chunks: Iterable[PromptChunk]) -> int:
    """Stores those of the chunks, and their prefix, that are not there; counts the former.

    Every rank computes its own heads; rank 0 puts them together, decides what is missing, and
    writes. Raises StoreFullError, or where ranks share the model RankFailed, on all of them.
    """
    ranks, wanted = writer.model.ranks, list(chunks)
    if ranks.size == 1:
        return writer.write_missing(wanted, saved=True)
    before, missing = _missing(writer, wanted)
    alone = ChunkWriter(writer.model, writer.store, writer.spec, ())
    for own, lacking in ((alone, before), (writer, missing)):
        for batch in own.batches(lacking):
            computed = together(ranks, partial(own.compute, batch))
            together(ranks, partial(_keep, own, computed))
    return len(missing)


def _missing(
    writer: ChunkWriter, chunks: Sequence[PromptChunk]
) -> tuple[list[PromptChunk], list[PromptChunk]]:
    """What rank 0 finds missing: the prefix, if so, and chunks."""
    ranks = writer.model.ranks

    def look() -> str:
        if not ranks.leads:
            return ""
        prefix, missing = writer.missing(chunks)
        return json.dumps([prefix, [chunks.index(chunk) for chunk in missing]])

    prefix, found = json.loads(ranks.exchanged(together(ranks, look))[0])
    before = [PromptChunk(writer.prefix, None)] if prefix and found else []
    return before, [chunks[index] for index in found]


def _keep(writer: ChunkWriter, batch: Batch) -> None:
    if writer.model.ranks.leads:
        writer.keep(batch, saved=True)
