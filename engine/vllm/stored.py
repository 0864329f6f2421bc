"""Chunks that a store knows, as prompts name them: by id, by the document they are of, or by a
collection of documents."""

from __future__ import annotations

from collections import OrderedDict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.catalog import Catalog, ChunkInfo
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.prompt import PromptChunk

if TYPE_CHECKING:
    from engine.retrieval import BM25Retriever

_KEPT = 4096


class StoredChunks:
    """The chunks of one store, as one model encodes them. What was encoded once is kept."""

    def __init__(self, store: ChunkStore, blueprint: Blueprint) -> None:
        self.store, self._blueprint = store, blueprint
        self._index: tuple[tuple[int, str], BM25Retriever[ChunkInfo]] | None = None
        self._encoded: OrderedDict[tuple[str, str], PromptChunk] = OrderedDict()

    def chunk(self, name: str) -> PromptChunk:
        """The chunk of this id or, of a document's chunks, of this beginning of one.

        Raises NotFoundError where there is none, UsageError where several begin so and for what is
        no id, IntegrityError for a text that was altered in the store.
        """
        try:
            return self._encode(self.store.catalog.chunk(name))
        except NotFoundError:
            known = self._computed(name.strip().lower())
            if known is None:
                raise
            return known

    def document(self, name: str) -> list[PromptChunk]:
        """All chunks of a document, in its order. Raises as `find_document`, and IntegrityError."""
        catalog = self.store.catalog
        return [self._encode(chunk) for chunk in catalog.chunks(find_document(catalog, name))]

    def collection(self, name: str, question: str, top_k: int | None) -> list[PromptChunk]:
        """The chunks of a collection that fit the question best, best first; with None all of them,
        in the documents' order.

        Raises NotFoundError for one that isn't there and where no chunk has a word in common with
        the question, UsageError where all are more than the model's context, IntegrityError.
        """
        catalog = self.store.catalog
        if top_k is None:
            chunks = catalog.chunks(collections=[name])
            tokens, context = sum(c.tokens for c in chunks), self._blueprint.config.context
            if tokens > context:
                raise UsageError(
                    f"collection {name!r} has {tokens} tokens, and the context {context}",
                    'give "top_k": the chunks that fit the question best',
                )
            return [self._encode(chunk) for chunk in chunks]
        wanted, kept = (catalog.revision, name), self._index
        if kept is None or kept[0] != wanted:
            from engine.retrieval import BM25Retriever

            kept = wanted, BM25Retriever(catalog.chunks(collections=[name]))
            self._index = kept
        found = [self._encode(hit.chunk) for hit in kept[1].search(question, top_k)]
        if not found:
            raise NotFoundError(
                f"no chunk of collection {name!r} has a word in common with the question"
            )
        return found

    def _encode(self, chunk: ChunkInfo) -> PromptChunk:
        kept = self._encoded.get((chunk.chunk_id, chunk.source))
        if kept is not None:
            return kept
        if chunk_id(chunk.text) != chunk.chunk_id:
            raise IntegrityError(
                f"the text of chunk {chunk.chunk_id[:12]} was altered in the store",
                f"ingest {chunk.source} again",
            )
        ids = tuple(self._blueprint.tokenizer.encode(chunk.text))
        found = PromptChunk(ids, chunk.chunk_id, chunk.source)
        self._encoded[chunk.chunk_id, chunk.source] = found
        if len(self._encoded) > _KEPT:
            self._encoded.popitem(last=False)
        return found

    def _computed(self, name: str) -> PromptChunk | None:
        """One that no document has, but KV is stored of under its whole id. Requests say what the
        ids of their chunks are: one whose tokens don't spell that text is another's."""
        spell = self._blueprint.tokenizer.decode
        for key in self.store.keys_of_chunk(name):
            header = self.store.header(key)
            if (
                header is not None
                and header.spec == self._blueprint.spec
                and chunk_id(spell(header.token_ids, skip_special=False)) == name
            ):
                return PromptChunk(header.token_ids, name)
        return None


def find_document(catalog: Catalog, name: str) -> str:
    """The source of a document that was ingested, given that or the end of its path.

    Raises UsageError where several end so, NotFoundError, naming the nearest, where none does.
    """
    known = [info.source for info in catalog.documents()]
    if name in known:
        return name
    bare = name.strip("/")
    ending = [source for source in known if bare and source.endswith("/" + bare)]
    if len(ending) > 1:
        raise UsageError(
            f"{len(ending)} documents are called {name[:200]!r}: {', '.join(ending[:3])}",
            "give more of the path",
        )
    if ending:
        return ending[0]
    near = get_close_matches(name[:200], [*known, *(Path(s).name for s in known)], n=1, cutoff=0.6)
    raise NotFoundError(
        f"no document {name[:200]!r} in the store",
        f"did you mean {near[0]!r}?" if near else "cacheblend store ls --documents shows them",
    )
