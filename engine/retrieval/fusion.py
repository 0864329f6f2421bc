"""Several retrievers as one, by reciprocal rank fusion (Cormack et al., 2009)."""

from __future__ import annotations

from typing import Generic

from engine.retrieval.hit import ChunkT, Hit, Retriever, check_top_k

RANK_CONSTANT = 60
"""How little it matters whether a chunk is the first or the tenth of one retriever."""

DEPTH = 100
"""So many hits of each retriever count, or `top_k` where that is more."""


class HybridRetriever(Generic[ChunkT]):
    """What several retrievers find, best first by the sum of 1 / (60 + rank) over them.

    Scores are shares of the most there can be: 1 is the first hit of all of them.
    """

    def __init__(self, *retrievers: Retriever[ChunkT]) -> None:
        self._retrievers = retrievers

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """The chunks that any of the retrievers finds, best first, `top_k` at most.

        Equal scores are in the order of the first retriever that found them. Raises UsageError
        for a `top_k` below 1.
        """
        check_top_k(top_k)
        chunks: dict[str, ChunkT] = {}
        scores: dict[str, float] = {}
        for retriever in self._retrievers:
            for hit in retriever.search(question, max(top_k, DEPTH)):
                one = hit.chunk.chunk_id
                chunks.setdefault(one, hit.chunk)
                scores[one] = scores.get(one, 0) + 1 / (RANK_CONSTANT + hit.rank)
        most = len(self._retrievers) / (RANK_CONSTANT + 1)
        best = sorted(scores, key=lambda one: -scores[one])[:top_k]
        return [
            Hit(chunks[one], scores[one] / most, rank) for rank, one in enumerate(best, start=1)
        ]
