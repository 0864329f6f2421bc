"""BM25: chunks by the words they have in common with the question."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Generic

import numpy as np

from engine.retrieval.arrays import Array
from engine.retrieval.corpus import Corpus, corpus_of
from engine.retrieval.hit import ChunkT, Hit, check_top_k
from engine.retrieval.keeping import Held, kept_arrays
from engine.retrieval.ranking import hits_of
from engine.retrieval.terms import TERMS_VERSION, question_terms, terms

FILE = "words.idx"


class BM25Retriever(Generic[ChunkT]):
    """An index over chunks, made once and searched any number of times.

    With a corpus that has a folder the index is kept there until the chunks change. Scores are
    Lucene's BM25, k1 1.5 and b 0.75: above 0 where a word is shared.
    """

    def __init__(self, chunks: Sequence[ChunkT] | Corpus[ChunkT]) -> None:
        self._corpus = corpus = corpus_of(chunks)
        bm25s = _import_bm25s()
        self._index = bm25s.BM25(backend="numpy", csc_backend="numpy")
        self._ids, held = kept_arrays(
            corpus,
            FILE,
            f"terms {TERMS_VERSION}, bm25s {bm25s.__version__}",
            lambda ids, *_: _indexed(self._index, corpus.texts(ids)),
        )
        words = held["vocabulary"].tobytes().decode("utf-8", "surrogatepass").split("\n")
        self._vocabulary = {word: number for number, word in enumerate(words) if word}
        self._index.nonoccurrence_array = None
        self._index.scores = {name: held[name] for name in ("data", "indices", "indptr")}
        self._index.scores["num_docs"] = len(self._ids)

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """The chunks that share a word with the question, best first, `top_k` at most.

        Equal scores keep the order of the chunks. Raises UsageError for a `top_k` below 1.
        """
        check_top_k(top_k)
        known = self._vocabulary
        numbers = [known[term] for term in question_terms(question) if term in known]
        if not numbers:
            return []
        # bm25s's own top-k breaks ties by memory order, so only the scores are its.
        scores = self._index.get_scores_from_ids(numbers)
        return hits_of(self._corpus, self._ids, scores, top_k)


def _indexed(index: Any, texts: Iterable[str]) -> Held:
    """The scores of every word in every text, as bm25s has them: for each word of the vocabulary
    (UTF-8, a line each), from indptr (int64) on, in which texts (indices, int32) it has which
    (data, float32)."""
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    rows = [[vocabulary[term] for term in terms(text)] for text in texts]
    # A text without a single word can't be found; in the index it would only shorten the average
    # length that the others are measured against.
    worded = np.flatnonzero([bool(row) for row in rows]).astype(np.int32)
    scores: dict[str, Array] = {
        "data": np.zeros(0, np.float32),
        "indices": worded,
        "indptr": np.zeros(1, np.int64),
    }
    if len(worded):
        found = [row for row in rows if row]
        index.index((found, dict(vocabulary)), create_empty_token=False, show_progress=False)
        scores = {name: index.scores[name] for name in scores}
        scores["indices"] = worded[scores["indices"]]
    words = "\n".join(vocabulary).encode("utf-8", "surrogatepass")
    return {**scores, "vocabulary": np.frombuffer(words, np.uint8)}


def _import_bm25s() -> ModuleType:
    """Imports bm25s for the first index, quietly and with numpy alone.

    On import it also loads numba and runs a first operation in JAX where they are installed; JAX
    would take most of a GPU's memory for it. tqdm takes as long as all the rest. None is used.
    """
    with _hidden("numba", "jax", "jax.lax", "tqdm"):
        import bm25s

    # It sets its own logger to DEBUG: whoever logs the root logger would get a line an index.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    module: ModuleType = bm25s
    return module


@contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Makes importing these modules fail inside the block, unless they are already loaded."""
    hidden = [name for name in modules if name not in sys.modules]
    # None in sys.modules is Python's documented way to say "not to be imported".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
