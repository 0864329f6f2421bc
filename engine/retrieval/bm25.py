"""Which chunks a question is about: BM25 over the words the two have in common."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic

from engine.retrieval.hit import ChunkT, Hit, check_top_k
from engine.retrieval.terms import question_terms, terms


class BM25Retriever(Generic[ChunkT]):
    """An index over chunks, built once and searched any number of times.

    Chunks with the same `chunk_id` are the same text: the first stands for all of them, so that
    a text found in two documents doesn't fill two places of the prompt.
    """

    def __init__(self, chunks: Sequence[ChunkT]) -> None:
        first_of_id: dict[str, ChunkT] = {}
        for chunk in chunks:
            first_of_id.setdefault(chunk.chunk_id, chunk)
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__
        self._chunks: list[ChunkT] = []
        rows: list[list[int]] = []
        for chunk in first_of_id.values():
            # A chunk without a single word can't be found; in the index it would only shorten
            # the average length that BM25 measures the others against.
            if row := [vocabulary[term] for term in terms(chunk.text)]:
                self._chunks.append(chunk)
                rows.append(row)
        self._vocabulary: dict[str, int] = dict(vocabulary)
        self._index: Any = None
        if rows:
            self._index = _import_bm25s().BM25(backend="numpy", csc_backend="numpy")
            self._index.index(
                (rows, self._vocabulary), create_empty_token=False, show_progress=False
            )

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """Return the chunks that share a word with the question, best first, `top_k` at most.

        Equal scores keep the order the chunks were given in. Nothing in common: an empty list.
        Raises UsageError for a `top_k` below 1.
        """
        check_top_k(top_k)
        ids = [
            self._vocabulary[term] for term in question_terms(question) if term in self._vocabulary
        ]
        if not ids:
            return []
        # bm25s's own top-k breaks ties by memory order, so the best are picked here. Its idf is
        # positive for every term (Lucene's variant), so a score above 0 means a shared word.
        scores: list[float] = self._index.get_scores_from_ids(ids).tolist()
        found = [row for row, score in enumerate(scores) if score > 0]
        found.sort(key=lambda row: -scores[row])
        return [
            Hit(chunk=self._chunks[row], score=scores[row], rank=rank)
            for rank, row in enumerate(found[:top_k], start=1)
        ]


def _import_bm25s() -> ModuleType:
    """Import bm25s (a fifth of a second) for the first index, quietly and with numpy alone.

    On import it also loads numba and runs a first operation in JAX where they are installed;
    JAX would take most of a GPU's memory for it, and neither is used here.
    """
    with _hidden("numba", "jax", "jax.lax"):
        import bm25s

    # It sets its own logger to DEBUG: whoever logs the root logger would get a line an index.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    module: ModuleType = bm25s
    return module


@contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Make importing these modules fail inside the block, unless they are already loaded."""
    hidden = [name for name in modules if name not in sys.modules]
    # None in sys.modules is Python's documented way to say "not to be imported".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
