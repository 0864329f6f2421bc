"""A retriever of your own: chunks by the letters they share with the question, so that a slip of
the pen is forgiven.

    cacheblend search --retriever examples/own_retriever.py:Letters "Who is the harbor mastre?"
    cacheblend ask --retriever examples/own_retriever.py:words_and_letters "…"

A function gets (question, chunks, top_k). A class is made with the chunks, once, and has a method
search(question, top_k). Both give the best chunks first: each alone, or in a pair with its score.
A chunk has chunk_id, text, source, ordinal, tokens, place and headings.
"""

from collections.abc import Sequence

from cache_store.catalog import ChunkInfo
from engine.retrieval import BM25Retriever, Hit, HybridRetriever, OwnRetriever


def letters(text: str) -> set[str]:
    """Every three letters that follow one another."""
    flat = " ".join(text.lower().split())
    return {flat[at : at + 3] for at in range(len(flat) - 2)}


class Letters:
    def __init__(self, chunks: Sequence[ChunkInfo]) -> None:
        self.chunks = [(chunk, letters(chunk.text)) for chunk in chunks]

    def search(self, question: str, top_k: int) -> list[tuple[ChunkInfo, float]]:
        asked = letters(question)
        scored = [(chunk, len(asked & held) / len(asked)) for chunk, held in self.chunks if asked]
        return sorted(scored, key=lambda pair: -pair[1])[:top_k]


def words_and_letters(
    question: str, chunks: Sequence[ChunkInfo], top_k: int
) -> list[Hit[ChunkInfo]]:
    """Ours can be used in yours: here both ranks decide."""
    by_letters = OwnRetriever("letters", Letters, chunks)
    return HybridRetriever(BM25Retriever(chunks), by_letters).search(question, top_k)
