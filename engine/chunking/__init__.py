"""Documents to chunks; see `engine.chunking.cutting` for where they are cut."""

from engine.chunking.chunk import Chunk
from engine.chunking.cutting import MIN_CHUNK_TOKENS, cut_document
from engine.chunking.graphemes import is_boundary
from engine.chunking.rules import Cutting

__all__ = ["MIN_CHUNK_TOKENS", "Chunk", "Cutting", "cut_document", "is_boundary"]
