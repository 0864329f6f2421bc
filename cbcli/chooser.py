"""Which chunks a prompt gets: those that were named, or those its question retrieves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_store.catalog import ChunkInfo
from cache_store.errors import IntegrityError, NotFoundError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from cbcli.output import Output
from cbcli.settings import Settings

if TYPE_CHECKING:
    from engine.retrieval import Hit, Retriever


class Chooser:
    """Chooses chunks of one store. What questions are looked up in is built once, and again only
    after the catalog has changed. out: where it is said how that goes on, if it takes long."""

    def __init__(self, store: ChunkStore, out: Output | None = None) -> None:
        self.store, self._out = store, out
        self._retriever: Retriever[ChunkInfo] | None = None
        self._built_for: tuple[object, ...] = ()

    def choose(self, settings: Settings, question: str, names: Sequence[str]) -> list[ChunkInfo]:
        """The chunks named, or without names those retrieved and their neighbours, in the order
        the settings ask for.

        Raises as `named` and `hits` do.
        """
        if names:
            return in_order(self.named(names), settings, question)
        found = self.with_neighbours(settings, [h.chunk for h in self.hits(settings, question)])
        # By score, as they are; a neighbour's place is beside its hit, whatever its own score.
        return found if settings.order == "score" else in_order(found, settings, question)

    def named(self, names: Sequence[str]) -> list[ChunkInfo]:
        """The chunks of these ids or beginnings of ids.

        Raises NotFoundError for an unknown one, UsageError for one that several begin with.
        """
        return [self._unaltered(self.store.catalog.chunk(name)) for name in names]

    def hits(self, settings: Settings, question: str) -> list[Hit[ChunkInfo]]:
        """The chunks of all documents, or of those in the collections set, that fit the question
        best, best first, and how well. Raises NotFoundError where none does, or none well enough,
        and for a collection that isn't there."""
        found = self._index(settings).search(question, settings.top_k)
        if not found:
            raise NotFoundError(
                "no stored chunk has a word in common with the question"
                if settings.retriever == "bm25"
                else "no stored chunk fits the question",
                "use other words; `cacheblend store ls` lists the chunks, and `ask --chunk ID` "
                "takes one",
            )
        least = settings.min_score
        kept = [hit for hit in found if least is None or hit.score >= least]
        if not kept:
            raise NotFoundError(
                f"no stored chunk has a score of {least:g} or more; the best has "
                f"{found[0].score:.4g}",
                "lower --min-score, or use other words",
            )
        for hit in kept:
            self._unaltered(hit.chunk)
        return kept

    def with_neighbours(self, settings: Settings, chunks: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """The chunks, each among those before and after it in its document, as many as the
        settings say; no text twice. Where that makes one piece of a document of several chunks,
        it stands in the document's order at the place of the first of them."""
        if not settings.with_neighbours:
            return list(chunks)
        runs: dict[str, list[int]] = {}  # of a chunk, the piece it is in: first and last ordinal
        source, run = "", [0, -2]
        for chunk in sorted(chunks, key=lambda chunk: (chunk.source, chunk.ordinal)):
            first, last = (chunk.ordinal + n * settings.with_neighbours for n in (-1, 1))
            if chunk.source == source and first <= run[1] + 1:
                run[1] = last
            else:
                source, run = chunk.source, [first, last]
            runs[chunk.chunk_id] = run
        found: dict[str, ChunkInfo] = {}
        pieces = dict.fromkeys((c.source, tuple(runs[c.chunk_id])) for c in chunks)
        for source, (first, last) in pieces:
            for one in self.store.catalog.chunks_between(source, first, last):
                found.setdefault(one.chunk_id, self._unaltered(one))
        return list(found.values())

    def _index(self, settings: Settings) -> Retriever[ChunkInfo]:
        from cbcli.retrievers import open_retriever

        wanted = (
            *(self.store.catalog.revision, settings.collections),
            *(settings.retriever, settings.embed_model),
        )
        if self._retriever is None or self._built_for != wanted:
            self._retriever = open_retriever(settings, self.store, self._out)
            self._built_for = wanted
        return self._retriever

    def _unaltered(self, chunk: ChunkInfo) -> ChunkInfo:
        if chunk_id(chunk.text) != chunk.chunk_id:
            raise IntegrityError(
                f"the text of chunk {chunk.chunk_id[:12]} was altered in the store",
                f"ingest {chunk.source} again",
            )
        return chunk


def in_order(chunks: Sequence[ChunkInfo], settings: Settings, question: str) -> list[ChunkInfo]:
    """The chunks in the order the settings ask for. By score, those without a word in common with
    the question come last, as they were."""
    if settings.order == "score":
        from engine.retrieval import BM25Retriever

        scored = BM25Retriever(chunks).search(question, len(chunks)) if chunks else []
        ranks = {hit.chunk.chunk_id: hit.rank for hit in scored}
        return sorted(chunks, key=lambda chunk: ranks.get(chunk.chunk_id, len(chunks) + 1))
    if settings.order == "source":
        return sorted(chunks, key=lambda chunk: (chunk.source, chunk.ordinal))
    ordered = list(chunks)
    if settings.order == "shuffle":
        random.Random(settings.seed).shuffle(ordered)
    return ordered
