"""Which of the chunks or documents a listing shows, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from cache_store.catalog import ChunkInfo, DocumentInfo
from cache_store.errors import UsageError
from cache_store.results import EntryInfo
from cbcli.command import nearest
from cbcli.session import shown_source

SORTS = ("source", "size", "tokens", "used", "hits", "ingested")
_Item = TypeVar("_Item", ChunkInfo, DocumentInfo)


@dataclass(frozen=True)
class ListingChoice:
    """text: in a source, a chunk's text, or the beginning of its id; with *, ? or [ a pattern for
    sources. cached: whether KV is stored, None for both. Raises UsageError for an unknown order."""

    text: str = ""
    sort: str = ""
    limit: int | None = None
    cached: bool | None = None

    def __post_init__(self) -> None:
        if self.sort and self.sort not in SORTS:
            near = nearest(self.sort, SORTS)
            raise UsageError(
                f"--sort {self.sort}: no such order",
                f"did you mean {near}?" if near else f"use one of {', '.join(SORTS)}",
            )

    @property
    def is_all(self) -> bool:
        return self == ListingChoice()

    def takes(self, chunk: ChunkInfo, cached: bool) -> bool:
        """Whether a chunk is chosen."""
        if self.cached is not None and self.cached != cached:
            return False
        if not self.text or self.names(chunk.source):
            return True
        if _is_pattern(self.text):
            return False
        wanted = self.text.casefold()
        return chunk.chunk_id.startswith(wanted) or wanted in chunk.text.casefold()

    def names(self, source: str) -> bool:
        """Whether the text is of this source; without a text none is."""
        if not self.text:
            return False
        shown = shown_source(source)
        if _is_pattern(self.text):
            return fnmatchcase(source, self.text) or fnmatchcase(shown, self.text)
        # As shown: the folders above the working one are in every source.
        return self.text.casefold() in shown.casefold()

    def ordered(
        self,
        items: Sequence[_Item],
        entries_of: Callable[[_Item], Sequence[EntryInfo]],
        ingested_at: Callable[[_Item], float],
    ) -> list[_Item]:
        """In the order wanted, which for numbers and times is the largest and latest first, and
        no more than wanted."""
        keys: dict[str, Callable[[_Item], float]] = {
            "size": lambda item: sum(e.nbytes for e in entries_of(item)),
            "tokens": lambda item: item.tokens,
            "used": lambda item: max((e.used_at for e in entries_of(item)), default=0.0),
            "hits": lambda item: sum(e.hits for e in entries_of(item)),
            "ingested": ingested_at,
        }
        if self.sort == "source":
            found = sorted(items, key=lambda item: item.source)
        elif self.sort:
            found = sorted(items, key=keys[self.sort], reverse=True)
        else:
            found = list(items)
        return found[: self.limit]


def _is_pattern(text: str) -> bool:
    return any(char in text for char in "*?[")
