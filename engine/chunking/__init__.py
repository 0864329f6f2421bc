"""Documents to chunks; see `engine.chunking.cutting` for where they are cut."""

from engine.chunking.chunk import Chunk
from engine.chunking.cutting import MIN_CHUNK_TOKENS, cut_document, split_document
from engine.chunking.graphemes import is_boundary

__all__ = ["MIN_CHUNK_TOKENS", "Chunk", "cut_document", "is_boundary", "split_document"]
