"""Tells of documents that are no longer what was ingested of them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from cache_store.catalog import ChunkInfo
from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from cbcli.session import shown_source


class ChangeWatch:
    """Looks at the files of the documents whose chunks are used, each once. To be asked after an
    answer: a file whose size or time differs is read."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._seen: set[str] = set()

    def lines(self, chunks: Iterable[ChunkInfo]) -> list[str]:
        """One line a document that changed or is gone, and wasn't told of yet."""
        from engine.changes import change_of

        told = []
        for source in dict.fromkeys(chunk.source for chunk in chunks):
            if not source or source in self._seen:
                continue
            self._seen.add(source)
            try:
                info = self._store.catalog.document(source)
            except CacheblendError:  # the answer is there; the catalog is others' business
                continue
            if info is None:
                continue
            change, shown = change_of(info), shown_source(source)
            if change == "changed":
                told.append(
                    f"{shown} has changed since it was ingested: cacheblend ingest {_quoted(shown)}"
                )
            elif change == "gone":
                told.append(
                    f"{shown} is gone, and the answer is from what was ingested of it: cacheblend "
                    f"store rm --document {_quoted(shown)}"
                )
            elif change == "touched" and not self._store.read_only:
                self._note(source)
        return told

    def _note(self, source: str) -> None:
        """So that the file needn't be read the next time."""
        with contextlib.suppress(CacheblendError, OSError):
            status = Path(source).stat()
            self._store.catalog.note_file(source, status.st_size, status.st_mtime_ns)


def _quoted(name: str) -> str:
    """As a shell takes it."""
    return shlex.quote(name)
