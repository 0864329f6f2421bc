"""What a store holds, joined for `cacheblend store`: documents, their chunks, their entries."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cache_store.catalog import ChunkInfo, DocumentInfo
from cache_store.store import ChunkStore, EntryInfo
from cache_store.usable import OTHER_PREFIX, YES, Present
from cbcli.listing_choice import ListingChoice
from cbcli.session import shown_source
from cbcli.text import one_line, shorten
from cbcli.units import count_text, size_text
from engine.context import kind_behind

SHOWN_DIGITS = 12
BEGINNING = 48  # columns of a chunk's text in the list


class StoreListing:
    """What is stored, joined: documents, their chunks, and the entries of each.

    present: what the settings come to, where that is known, to tell what they can use.
    """

    def __init__(self, store: ChunkStore, present: Present | None = None) -> None:
        self.store, self.present = store, present
        self.partial = False
        self.documents = store.catalog.documents()
        self.chunks = store.catalog.chunks()
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

    def chunk_rows(self) -> Iterator[list[str]]:
        """One row a chunk, model and KV dtype; one for a chunk that isn't cached."""
        for chunk in self.chunks:
            start = [
                chunk.chunk_id[:SHOWN_DIGITS],
                shown_source(chunk.source),
                count_text(chunk.tokens),
            ]
            text = shorten(one_line(chunk.text.strip()), BEGINNING)
            kinds: dict[tuple[str, str, str], list[EntryInfo]] = {}
            for entry in self.by_chunk.get(chunk.chunk_id, []):
                kind = (self.names[entry.spec.model], entry.spec.model, entry.spec.dtype)
                kinds.setdefault(kind, []).append(entry)
            for (model, _, dtype), mine in sorted(kinds.items()):
                behind = ", ".join(sorted({kind_behind(e.context_tokens) for e in mine}))
                size = size_text(sum(e.nbytes for e in mine))
                yield [*start, size, model, dtype, "yes", behind, self._use_of(mine), text]
            if not kinds:
                yield [*start, "", "", "", "no", "", "", text]

    def _use_of(self, entries: list[EntryInfo]) -> str:
        """What the present settings can do with entries of one kind; "?" where it isn't known."""
        if self.present is None:
            return "?"
        uses = {self.present.use_of(entry) for entry in entries}
        return next((use for use in (YES, OTHER_PREFIX) if use in uses), min(uses))

    def document_rows(self) -> Iterator[list[str]]:
        for document in self.documents:
            cached, nbytes = self._kv_of(document.source)
            yield [
                shown_source(document.source),
                count_text(document.chunks),
                count_text(cached),
                count_text(document.tokens),
                size_text(nbytes),
                "yes" if document.pinned else "",
                _moment(document.ingested_at),
            ]

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
            f"{plural(e.hits, 'time', 'times')}, last {_moment(e.used_at)}; stored "
            f"{_moment(e.stored_at)}\nkey {e.key}"
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

    def described(self, *, documents: bool) -> dict[str, Any]:
        """All of it for --json, or the documents alone; sizes in bytes, times in seconds since the
        epoch."""
        listed = []
        for document in self.documents:
            cached, nbytes = self._kv_of(document.source)
            listed.append({**described_document(document), "cached": cached, "bytes": nbytes})
        if documents:
            return {"store": str(self.store.path), "documents": listed}
        known = {chunk.chunk_id for chunk in self.chunks}
        return {
            "store": str(self.store.path),
            "documents": listed,
            "chunks": [self.chunk(chunk) for chunk in self.chunks],
            "other_entries": []
            if self.partial
            else [self._entry(e) for e in self.entries if e.chunk_id not in known],
        }

    def chunk(self, chunk: ChunkInfo) -> dict[str, Any]:
        entries = self.by_chunk.get(chunk.chunk_id, [])
        return {
            "chunk_id": chunk.chunk_id,
            **described_place(chunk),
            "tokens": chunk.tokens,
            "cached": bool(entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "entries": [self._entry(entry) for entry in entries],
        }

    def _entry(self, entry: EntryInfo) -> dict[str, Any]:
        spec = entry.spec
        return {
            "key": entry.key,
            "model": {"name": self.given_names[spec.model], "fingerprint": spec.model},
            "dtype": spec.dtype,
            "tokens": entry.tokens,
            "context": kind_behind(entry.context_tokens),
            "context_tokens": entry.context_tokens,
            "regime": entry.regime,
            "bytes": entry.nbytes,
            "saved": entry.saved,
            "hits": entry.hits,
            "stored_at": entry.stored_at,
            "used_at": entry.used_at,
            "usable": None if self.present is None else self.present.use_of(entry),
        }


def described_document(info: DocumentInfo) -> dict[str, Any]:
    """A document for --json; how it was cut as an object."""
    described = asdict(info)
    with contextlib.suppress(ValueError):
        described["settings"] = json.loads(info.settings)
    return described


def described_place(chunk: ChunkInfo) -> dict[str, Any]:
    """Where a chunk is, for --json; start and end in characters."""
    return {
        "source": chunk.source,
        "ordinal": chunk.ordinal,
        "start": chunk.start,
        "end": chunk.end,
    }


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _behind(tokens: int) -> str:
    if not tokens:
        return "nothing"
    return f"{plural(tokens, 'token', 'tokens')} ({kind_behind(tokens)})"


def plural(count: int, one: str, several: str) -> str:
    """A count and its noun: "1 entry", "2 entries"."""
    return count_text(count, one if count == 1 else several)
