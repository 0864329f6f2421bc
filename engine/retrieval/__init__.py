"""Which chunks a question is about.

A `Retriever` finds chunks: `BM25Retriever`, the default, by the words they share with the question;
`EmbedRetriever` by the meaning of both; `HybridRetriever` by several of them; `OwnRetriever` as the
user's own code does. Each is made over chunks in memory, or over `CatalogChunks`.
"""

from engine.retrieval.bm25 import BM25Retriever
from engine.retrieval.corpus import CatalogChunks, Corpus
from engine.retrieval.embed import Embedder, EmbedRetriever, StaticEmbedder
from engine.retrieval.fusion import HybridRetriever
from engine.retrieval.hit import Hit, Retriever, SearchableChunk
from engine.retrieval.own import OwnRetriever

__all__ = [
    "BM25Retriever",
    "CatalogChunks",
    "Corpus",
    "EmbedRetriever",
    "Embedder",
    "Hit",
    "HybridRetriever",
    "OwnRetriever",
    "Retriever",
    "SearchableChunk",
    "StaticEmbedder",
]
