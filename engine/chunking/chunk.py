"""A chunk: what documents are cut into."""

from __future__ import annotations

from dataclasses import dataclass

from cache_store.catalog import Place
from cache_store.keys import chunk_id


@dataclass(frozen=True)
class Chunk:
    """A run of a document's text that is tokenized and stored alone.

    token_ids: ids of `text` encoded alone.
    start, end: the run's `[start, end)` in the document, in characters; text that is repeated in
    front of the run, such as a table's header, is part of `text` alone.
    place: where in its file the run stands. headings: those it stands under, the outermost first.
    """

    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    place: Place | None = None
    headings: tuple[str, ...] = ()

    @property
    def chunk_id(self) -> str:
        """Hash of the text; the same for every model."""
        return chunk_id(self.text)
