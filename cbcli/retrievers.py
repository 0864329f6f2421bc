"""The retriever that the settings name, over the chunks of a store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.catalog import ChunkInfo
from cache_store.errors import NotFoundError
from cache_store.store import ChunkStore
from cbcli.output import Output
from cbcli.progress import Progress
from cbcli.settings import Settings, data_root
from cbcli.values import RETRIEVERS

if TYPE_CHECKING:
    from engine.retrieval import CatalogChunks, EmbedRetriever, Retriever

FOLDER = "search"
"""In the folder of the user's data: indexes of words, and vectors, by store."""

SHOWN_FROM = 2000
"""Texts to be read, below which nobody waits long enough to be told."""


def open_retriever(
    settings: Settings, store: ChunkStore, out: Output | None = None
) -> Retriever[ChunkInfo]:
    """out: where it is said how far reading many new texts is.

    Raises NotFoundError for a store without chunks, a collection or an embedding model that
    isn't there; UsageError where an extra is missing, and for a retriever of the user's own that
    can't be found."""
    count = sum(document.chunks for document in store.catalog.documents())
    if not count:
        raise NotFoundError(
            f"the store at {store.path} has no chunks", "fill it: cacheblend ingest PATH"
        )
    if settings.retriever not in RETRIEVERS:
        return _own(settings, store)
    from engine.retrieval import BM25Retriever, CatalogChunks, HybridRetriever
    from engine.retrieval.keeping import KEPT_FROM, kept_folder

    folder = kept_folder(data_root() / FOLDER, store.path) if count >= KEPT_FROM else None
    with _Reading(out) as reading:
        corpus = CatalogChunks(store.catalog, folder, settings.collections, reading.read)
        if settings.retriever == "bm25":
            return BM25Retriever(corpus)
        if settings.retriever == "embed":
            return _embed(settings, corpus)
        return HybridRetriever(BM25Retriever(corpus), _embed(settings, corpus))


class _Reading(contextlib.ExitStack):
    """Says how far reading texts is, once it is known to take long."""

    def __init__(self, out: Output | None) -> None:
        super().__init__()
        self._out = out
        self._progress: Progress | None = None

    def read(self, done: int, total: int) -> None:
        if self._out is None or total < SHOWN_FROM:
            return
        if self._progress is None:
            self._progress = self.enter_context(self._out.progress("indexing", unit="chunks"))
        self._progress.update(done, total=total)


def _embed(settings: Settings, corpus: CatalogChunks) -> EmbedRetriever[ChunkInfo]:
    from engine.retrieval import EmbedRetriever, StaticEmbedder
    from engine.retrieval.embed import find_model, require_model2vec

    require_model2vec()  # before anything is downloaded
    folder = find_model(settings.embed_model, offline=settings.offline)
    return EmbedRetriever(corpus, StaticEmbedder(folder))


def _own(settings: Settings, store: ChunkStore) -> Retriever[ChunkInfo]:
    from engine.retrieval.own import OwnRetriever, load_own

    origin = settings.origin("retriever")
    # A module that a file names is not one of the folder that one happens to be in.
    folder = origin.folder if origin.kind in ("project", "user") else Path.cwd()
    own = load_own(settings.retriever, [folder])
    chunks = store.catalog.chunks(collections=settings.collections)
    return OwnRetriever(settings.retriever, own, chunks)
