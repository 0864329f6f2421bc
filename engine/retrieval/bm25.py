"""BM25: chunks by the words they have in common with the question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np

from engine.retrieval.corpus import Corpus, corpus_of
from engine.retrieval.hit import ChunkT, Hit, check_top_k
from engine.retrieval.keeping import Change, Held, kept_arrays
from engine.retrieval.postings import Postings
from engine.retrieval.ranking import hits_of
from engine.retrieval.terms import TERMS_VERSION, question_terms

K1, B = 1.5, 0.75
"""How soon more of the same word counts for less, and how much a long chunk is held against it."""

FILE = "words.idx"


class BM25Retriever(Generic[ChunkT]):
    """An index over chunks, made once and searched any number of times.

    With a corpus that has a folder the index is kept there, and only what is new is read the next
    time. Scores are Lucene's BM25, k1 1.5 and b 0.75: above 0 where a word is shared.
    """

    def __init__(self, chunks: Sequence[ChunkT] | Corpus[ChunkT]) -> None:
        self._corpus = corpus_of(chunks)
        self._ids, held = kept_arrays(self._corpus, FILE, f"terms {TERMS_VERSION}", _merged)
        self._postings = Postings(**held)
        lengths = self._postings.lengths
        # A chunk without a single word can't be found; counted, it would only shorten the average
        # length that the others are measured against.
        self._count = int(np.count_nonzero(lengths))
        mean = lengths.sum(dtype=np.float64) / max(1, self._count)
        self._norms = (K1 * (1 - B + B * lengths / max(mean, 1))).astype(np.float32)

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """The chunks that share a word with the question, best first, `top_k` at most.

        Equal scores keep the order of the chunks. Raises UsageError for a `top_k` below 1.
        """
        check_top_k(top_k)
        scores = np.zeros(len(self._ids), np.float32)
        for term in question_terms(question):
            rows, counts = self._postings.of_term(term)
            if len(rows):
                rare = np.log1p((self._count - len(rows) + 0.5) / (len(rows) + 0.5))
                scores[rows] += np.float32(rare) * (counts / (counts + self._norms[rows]))
        return hits_of(self._corpus, self._ids, scores, top_k)


def _merged(held: Held | None, change: Change) -> Held:
    if held is None:
        return vars(Postings.of(change.texts))
    return vars(Postings(**held).updated(change.places, change.count, change.rows, change.texts))
