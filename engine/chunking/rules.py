"""How documents are cut, as it is set and recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from engine.chunking.chunk import Chunk
from engine.chunking.cutting import cut_document
from engine.documents.document import Document
from engine.tokenizer import Tokenizer

CUTTING_VERSION = 2  # raise it when the same text would be cut elsewhere


@dataclass(frozen=True)
class Cutting:
    """How documents are cut; a document cut otherwise counts as changed. headings: whether the
    headings a chunk stands under are part of its text."""

    chunk_tokens: int = 512
    overlap: int = 0
    headings: bool = False

    def cut(self, document: Document, tokenizer: Tokenizer) -> Iterator[Chunk]:
        """The document's chunks, one after another. Raises UsageError, at once, for a cutting that
        cannot be."""
        return cut_document(
            *(document.text, tokenizer, self.chunk_tokens, self.overlap),
            form=document.form,
            marks=document.marks,
            headings=self.headings,
        )

    def record(self, tokenizer: str) -> str:
        """As the catalog keeps it beside a document. tokenizer: fingerprint of what it was cut
        for."""
        return json.dumps(
            {
                "version": CUTTING_VERSION,
                "chunk_tokens": self.chunk_tokens,
                "overlap": self.overlap,
                "headings": self.headings,
                "tokenizer": tokenizer,
            }
        )
