"""What a store holds, joined for `cacheblend store`: documents, their chunks, their entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cache_store.catalog import ChunkInfo
from cache_store.store import ChunkStore, EntryInfo
from cache_store.usable import OTHER_PREFIX, YES, Present
from cbcli.fields import (
    BYTES,
    CHUNK_ID,
    POSITION,
    SHOWN_DIGITS,
    SOURCE,
    TEXT,
    TOKENS,
    moment_text,
    size_or_none,
)
from cbcli.listing import Field, Listing, Record
from cbcli.listing_choice import ListingChoice
from cbcli.records import chunk_record, document_record, entry_record
from cbcli.session import shown_source
from cbcli.units import count_text, size_text
from engine.context import kind_behind


class StoreListing:
    """What is stored, joined: documents, their chunks, and the entries of each.

    present: what the settings come to, where that is known, to tell what they can use.
    collections: only their documents; none: all. Raises NotFoundError for one that isn't there.
    """

    def __init__(
        self,
        store: ChunkStore,
        present: Present | None = None,
        collections: Sequence[str] = (),
    ) -> None:
        self.store, self.present = store, present
        self.partial = bool(collections)
        self.documents = store.catalog.documents(collections=collections)
        self.chunks = store.catalog.chunks(collections=collections)
        self.entries = list(store.entries())
        self.by_chunk: dict[str, list[EntryInfo]] = {}
        for entry in self.entries:
            self.by_chunk.setdefault(entry.chunk_id, []).append(entry)
        self._ids: dict[str, list[str]] = {}  # of all chunks, by document
        for chunk in self.chunks:
            self._ids.setdefault(chunk.source, []).append(chunk.chunk_id)
        models = {entry.spec.model for entry in self.entries}
        self.given_names = {model: store.catalog.model_name(model) for model in models}
        self.names = {
            model: name or model[:SHOWN_DIGITS] for model, name in self.given_names.items()
        }

    def choose(self, choice: ListingChoice, *, documents: bool) -> None:
        """Leaves what is chosen, in the order that is asked for; documents: it is a list of
        documents, so that order and limit are theirs."""
        if choice.is_all:
            return
        self.partial = True
        ingested = {document.source: document.ingested_at for document in self.documents}
        kept = [c for c in self.chunks if choice.takes(c, c.chunk_id in self.by_chunk)]
        if documents:
            sources = {chunk.source for chunk in kept}
            by_source: dict[str, list[EntryInfo]] = {}
            for chunk in self.chunks:
                by_source.setdefault(chunk.source, []).extend(self.by_chunk.get(chunk.chunk_id, []))
            self.documents = choice.ordered(
                [d for d in self.documents if d.source in sources or choice.names(d.source)],
                lambda d: by_source.get(d.source, []),
                lambda d: d.ingested_at,
            )
            return
        self.chunks = choice.ordered(
            kept, lambda c: self.by_chunk.get(c.chunk_id, []), lambda c: ingested[c.source]
        )
        sources = {chunk.source for chunk in self.chunks}
        self.documents = [d for d in self.documents if d.source in sources]

    def chunk_records(self) -> Iterator[dict[str, Any]]:
        return (self.chunk(chunk) for chunk in self.chunks)

    def document_records(self) -> Iterator[dict[str, Any]]:
        collections: dict[str, list[str]] = {}
        for name, sources in self.store.catalog.collections().items():
            for source in sources:
                collections.setdefault(source, []).append(name)
        for document in self.documents:
            cached, nbytes = self._kv_of(document.source)
            record = document_record(document, collections.get(document.source, ()))
            yield {**record, "cached": cached, "bytes": nbytes}

    def _kv_of(self, source: str) -> tuple[int, int]:
        """How many of a document's chunks have KV, and the bytes of it."""
        ids = self._ids.get(source, [])
        cached = sum(1 for chunk_id in ids if chunk_id in self.by_chunk)
        return cached, sum(e.nbytes for i in set(ids) for e in self.by_chunk.get(i, []))

    def entry_lines(self, chunk_id: str) -> list[str]:
        """What is stored of a chunk, one line an entry."""
        return [
            f"yes, for {self.names[e.spec.model]} ({e.spec.dtype}), {size_text(e.nbytes)}, behind "
            f"{_behind(e.context_tokens)}{self._said_use(e)}\nused "
            f"{plural(e.hits, 'time', 'times')}, last {moment_text(e.used_at)}; stored "
            f"{moment_text(e.stored_at)}\nkey {e.key}"
            for e in self.by_chunk.get(chunk_id, [])
        ]

    def _said_use(self, entry: EntryInfo) -> str:
        if self.present is None:
            return ""
        use = self.present.use_of(entry)
        if use == YES:
            return ": usable"
        return f": usable, {use}" if use == OTHER_PREFIX else f": not usable, {use}"

    def summary(self) -> str:
        cached = sum(1 for chunk in self.chunks if chunk.chunk_id in self.by_chunk)
        known = {chunk.chunk_id for chunk in self.chunks}
        others = sum(1 for entry in self.entries if entry.chunk_id not in known)
        text = (
            f"{plural(len(self.documents), 'document', 'documents')}, "
            f"{plural(len(self.chunks), 'chunk', 'chunks')}, {count_text(cached)} cached"
        )
        if self.partial or not others:
            return text
        return f"{text}; {plural(others, 'entry', 'entries')} of no chunk here"

    def around_chunks(self, chunks: Sequence[Any]) -> dict[str, Any]:
        """The JSON document with the list of chunks in it."""
        known = {chunk.chunk_id for chunk in self.chunks}
        others = [] if self.partial else [e for e in self.entries if e.chunk_id not in known]
        return {
            **self.around_documents(list(self.document_records())),
            "chunks": chunks,
            "other_entries": [self._entry(entry) for entry in others],
        }

    def around_documents(self, documents: Sequence[Any]) -> dict[str, Any]:
        """The JSON document with the list of documents in it."""
        return {"store": str(self.store.path), "documents": documents}

    def chunk(self, chunk: ChunkInfo) -> dict[str, Any]:
        """A chunk for --json, with what is stored of it."""
        entries = self.by_chunk.get(chunk.chunk_id, [])
        return {
            **chunk_record(chunk),
            "cached": bool(entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "entries": [self._entry(entry) for entry in entries],
        }

    def _entry(self, entry: EntryInfo) -> dict[str, Any]:
        use = None if self.present is None else self.present.use_of(entry)
        return entry_record(entry, self.given_names[entry.spec.model], use)


def chunk_rows(record: Record) -> Iterator[dict[str, Any]]:
    """The lines of a chunk in the table: one a model and KV dtype; one if nothing is stored."""
    kinds: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in record["entries"]:
        name, fingerprint = entry["model"]["name"], entry["model"]["fingerprint"]
        kind = (name or fingerprint[:SHOWN_DIGITS], fingerprint, entry["dtype"])
        kinds.setdefault(kind, []).append(entry)
    for (model, _, dtype), mine in sorted(kinds.items()):
        yield {
            **record,
            "bytes": sum(entry["bytes"] for entry in mine),
            "model": model,
            "dtype": dtype,
            "behind": sorted({entry["context"] for entry in mine}),
            "usable": _best_use([entry["usable"] for entry in mine]),
        }
    if not kinds:
        yield {**record, "bytes": None, "model": None, "dtype": None, "behind": [], "usable": ""}


def _best_use(uses: Sequence[str | None]) -> str | None:
    """What the present settings can do with entries of one kind; None where it isn't known."""
    known = {use for use in uses if use is not None}
    return next((use for use in (YES, OTHER_PREFIX) if use in known), min(known, default=None))


CHUNKS = Listing(
    "chunks",
    "chunk_id",
    (
        CHUNK_ID,
        SOURCE,
        *POSITION,
        TOKENS,
        BYTES,
        Field("model", once=True, raw=False),
        Field("dtype", once=True, raw=False),
        Field("cached", once=True),
        Field("behind", once=True, raw=False),
        Field("usable", show=lambda use: "?" if use is None else use, once=True, raw=False),
        Field("entries", show=lambda entries: count_text(len(entries)), right=True, column=False),
        TEXT,
    ),
)
DOCUMENTS = Listing(
    "documents",
    "source",
    (
        Field("source", "document", shown_source),
        Field("kind", column=False),
        Field("collections", column=False),
        Field("chunks", show=count_text, right=True),
        Field("cached", show=count_text, right=True),
        TOKENS,
        BYTES,
        Field("pinned", show=lambda pinned: "yes" if pinned else ""),
        Field("ingested_at", "ingested", moment_text),
        Field("size", "file size", size_or_none, right=True, column=False),
        Field("mtime_ns", right=True, column=False),
        Field("digest", column=False),
        Field("settings", column=False),
    ),
)


def _behind(tokens: int) -> str:
    if not tokens:
        return "nothing"
    return f"{plural(tokens, 'token', 'tokens')} ({kind_behind(tokens)})"


def plural(count: int, one: str, several: str) -> str:
    """A count and its noun: "1 entry", "2 entries"."""
    return count_text(count, one if count == 1 else several)
