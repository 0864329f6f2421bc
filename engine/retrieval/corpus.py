"""What is searched: chunks in memory, or those of a store's catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol

from cache_store.catalog import Catalog, ChunkInfo
from cache_store.collecting import members
from engine.retrieval.hit import ChunkT

_AT_ONCE = 500  # chunks read from the catalog in one query


class Corpus(Protocol[ChunkT]):
    """Chunks by their ids. Those with the same id are the same text: the first stands for all of
    them, so that a text found in two documents doesn't fill two places of a prompt."""

    @property
    def folder(self) -> Path | None:
        """Where what is made of the chunks may be kept for the next process."""
        ...

    def ids(self) -> list[str]:
        """Every chunk's id once, in the chunks' order."""
        ...

    def among(self) -> set[str] | None:
        """Ids of the chunks that may be found; None: all."""
        ...

    def texts(self, chunk_ids: Sequence[str]) -> Iterator[str]:
        """The texts of these chunks, in their order."""
        ...

    def chunks(self, chunk_ids: Sequence[str]) -> list[ChunkT]:
        """These chunks, in their order."""
        ...


class GivenChunks(Generic[ChunkT]):
    """Chunks in memory as a corpus."""

    folder = None

    def __init__(self, chunks: Sequence[ChunkT]) -> None:
        self._first: dict[str, ChunkT] = {}
        for chunk in chunks:
            self._first.setdefault(chunk.chunk_id, chunk)

    def ids(self) -> list[str]:
        return list(self._first)

    def among(self) -> None:
        return None

    def texts(self, chunk_ids: Sequence[str]) -> Iterator[str]:
        return (self._first[one].text for one in chunk_ids)

    def chunks(self, chunk_ids: Sequence[str]) -> list[ChunkT]:
        return [self._first[one] for one in chunk_ids]


class CatalogChunks:
    """The chunks of a catalog as a corpus, read as far as they are needed.

    folder: see `Corpus`. collections: only chunks of documents in one of them are found; raises
    NotFoundError for one that isn't there. on_read: told now and then how many texts were read, of
    how many.
    """

    def __init__(
        self,
        catalog: Catalog,
        folder: Path | None = None,
        collections: Sequence[str] = (),
        on_read: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._on_read = on_read
        self._catalog, self.folder = catalog, folder
        self._collections = collections
        catalog.require_collections(collections)

    def ids(self) -> list[str]:
        rows = self._catalog.ask(
            "SELECT chunk_id FROM chunk JOIN document USING (source)"
            " ORDER BY place, chunk.source, ordinal"
        )
        return list(dict.fromkeys(str(row[0]) for row in rows))

    def among(self) -> set[str] | None:
        if not self._collections:
            return None
        rows = self._catalog.ask(
            f"SELECT chunk_id FROM chunk WHERE source IN ({members(self._collections)})",
            self._collections,
        )
        return {str(row[0]) for row in rows}

    def texts(self, chunk_ids: Sequence[str]) -> Iterator[str]:
        for start in range(0, len(chunk_ids), _AT_ONCE):
            self._on_read(start, len(chunk_ids))
            some = chunk_ids[start : start + _AT_ONCE]
            marks = ",".join("?" * len(some))
            rows = self._catalog.ask(
                f"SELECT chunk_id, text FROM chunk WHERE chunk_id IN ({marks})", some
            )
            found = dict(rows)
            # One that somebody took out meanwhile has no words.
            yield from (found.get(one, "") for one in some)

    def chunks(self, chunk_ids: Sequence[str]) -> list[ChunkInfo]:
        sources: set[str] | None = None
        if self._collections:
            sources = {d.source for d in self._catalog.documents(collections=self._collections)}
        found = []
        for one in chunk_ids:
            places = self._catalog.places(one)
            found += [p for p in places if sources is None or p.source in sources][:1]
        return found


def corpus_of(chunks: Sequence[ChunkT] | Corpus[ChunkT]) -> Corpus[ChunkT]:
    """Chunks as a corpus, whichever they are."""
    return GivenChunks(chunks) if isinstance(chunks, Sequence) else chunks
