"""Which chunks a question is about.

A `Retriever` finds chunks; `BM25Retriever`, by the words they share with the question, is the
default.
"""

from engine.retrieval.bm25 import BM25Retriever
from engine.retrieval.corpus import CatalogChunks, Corpus
from engine.retrieval.hit import Hit, Retriever, SearchableChunk

__all__ = ["BM25Retriever", "CatalogChunks", "Corpus", "Hit", "Retriever", "SearchableChunk"]
