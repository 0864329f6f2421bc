"""The catalog: which documents were ingested, and the text of their chunks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.catalog_database import CATALOG_NAME, SET_ASIDE, Claim
from cache_store.collecting import CollectionTable, check_collection_name, members
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.schema import raw

__all__ = [
    "CATALOG_NAME",
    "SET_ASIDE",
    "Catalog",
    "ChunkInfo",
    "ChunkText",
    "Claim",
    "DocumentInfo",
    "Place",
]

MIN_PREFIX = 4
_AT_ONCE = 500  # values in one query

_CHUNK_COLUMNS = (
    "chunk_id, text, chunk.tokens, chunk.source, ordinal, start, stop, unit, first, last, headings"
)


@dataclass(frozen=True)
class Place:
    """Where in its file a text stands, as a reader counts: `unit` first to last, both from 1 and
    both included. unit: one lower-case word, such as page, row, cell, chapter or line."""

    unit: str
    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.unit} {self.first}"
        return f"{self.unit}s {self.first}-{self.last}"


@dataclass(frozen=True)
class ChunkText:
    """A chunk as a document was cut. start, end: character offsets in the document's text, of
    what is cut from it: text repeated in front of that, such as a table's header, is not counted.
    headings: those it stands under, the outermost first."""

    chunk_id: str
    text: str
    start: int
    end: int
    tokens: int
    place: Place | None = None
    headings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DocumentInfo:
    """A document as it was ingested. digest: of its bytes; settings: JSON of how it was cut;
    ingested_at: seconds since the epoch. pinned: its chunks are never evicted. size, mtime_ns: of
    the file it was read from; -1 and 0 where there was none, or not here. kind: what the file is,
    such as text, markdown or pdf; empty where that is not known."""

    source: str
    digest: str
    settings: str
    chunks: int
    tokens: int
    ingested_at: float
    pinned: bool = False
    size: int = -1
    mtime_ns: int = 0
    kind: str = ""


@dataclass(frozen=True)
class ChunkInfo:
    """A chunk and where it stands: the ordinal-th of its document, characters [start, end); place
    and headings as in `ChunkText`."""

    chunk_id: str
    text: str
    tokens: int
    source: str
    ordinal: int
    start: int
    end: int
    place: Place | None = None
    headings: tuple[str, ...] = ()


class Catalog(CollectionTable):
    """One SQLite file next to the entries; several threads and processes may use it.

    Methods raise DamagedDatabase for a damaged file, StoreBusy for a locked one, and
    CacheblendError where the disk is full or fails.
    """

    # Documents.

    def replace_document(
        self,
        source: str,
        digest: str,
        settings: str,
        chunks: Sequence[ChunkText],
        *,
        size: int = -1,
        mtime_ns: int = 0,
        kind: str = "",
        collections: Sequence[str] = (),
    ) -> None:
        """Records a document and its chunks in the place of what was recorded of it, in one step.

        size, mtime_ns, kind: of its file, as in `DocumentInfo`. A replaced document keeps its place
        among the others, and its collections, and comes into `collections` too. Raises
        StoreFullError where the text doesn't fit under the store's limit, UsageError for a name
        that no collection can have.
        """
        names = [(check_collection_name(name), raw(source)) for name in collections]
        rows = [_chunk_row(source, n, chunk) for n, chunk in enumerate(chunks)]
        # Once in the log and once in the database, with their indexes.
        room = 2 * sum(len(row[3]) + len(row[-1]) + 2 * len(row[0]) + 400 for row in rows)
        tokens = sum(chunk.tokens for chunk in chunks)
        with self.growing(room), self.writing() as db:
            found = db.execute(
                "SELECT place FROM document WHERE source = CAST(? AS TEXT)", (raw(source),)
            ).fetchall()
            if not found:
                found = db.execute("SELECT coalesce(max(place), 0) + 1 FROM document").fetchall()
            db.execute("DELETE FROM chunk WHERE source = CAST(? AS TEXT)", (raw(source),))
            db.execute(
                "INSERT INTO document (source, digest, settings, chunks, tokens, ingested_at,"
                " place, size, mtime_ns, kind) VALUES (CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (source) DO UPDATE SET"
                " digest = excluded.digest, settings = excluded.settings,"
                " chunks = excluded.chunks, tokens = excluded.tokens,"
                " ingested_at = excluded.ingested_at, size = excluded.size,"
                " mtime_ns = excluded.mtime_ns, kind = excluded.kind",
                (
                    *(raw(source), digest, settings, len(rows), tokens, time.time()),
                    *(found[0][0], size, mtime_ns, kind),
                ),
            )
            db.executemany(
                "INSERT INTO chunk (source, ordinal, chunk_id, text, tokens, start, stop, unit,"
                " first, last, headings) VALUES"
                " (CAST(? AS TEXT), ?, ?, CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, CAST(? AS TEXT))",
                rows,
            )
            db.executemany(
                "INSERT OR IGNORE INTO collection (name, source) VALUES (?, CAST(? AS TEXT))", names
            )

    def note_file(self, source: str, size: int, mtime_ns: int) -> None:
        """Records that a document's file is now of this size and time, its text being the same."""
        known = self.document(source)
        if known is None or (known.size, known.mtime_ns) == (size, mtime_ns):
            return
        with self.writing(count=False) as db:
            db.execute(
                "UPDATE document SET size = ?, mtime_ns = ? WHERE source = CAST(? AS TEXT)",
                (size, mtime_ns, raw(source)),
            )

    def remove_document(self, source: str) -> bool:
        """Forgets a document and its chunks; whether there was one."""
        with self._shortened(), self.writing() as db:
            for table in ("chunk", "collection"):
                db.execute(f"DELETE FROM {table} WHERE source = CAST(? AS TEXT)", (raw(source),))
            gone = db.execute("DELETE FROM document WHERE source = CAST(? AS TEXT)", (raw(source),))
            return gone.rowcount > 0

    def document(self, source: str) -> DocumentInfo | None:
        """What is recorded of a document."""
        return next(iter(self._documents("WHERE source = CAST(? AS TEXT)", (raw(source),))), None)

    def documents(self, *, collections: Sequence[str] = ()) -> list[DocumentInfo]:
        """All documents, in the order they were first ingested; with collections, those in any of
        them.

        Raises NotFoundError for a collection that isn't there.
        """
        self.require_collections(collections)
        chosen = f"WHERE source IN ({members(collections)}) " if collections else ""
        return self._documents(f"{chosen}ORDER BY place, source", collections)

    def _documents(self, rest: str, values: Sequence[object]) -> list[DocumentInfo]:
        columns = (
            "source, digest, settings, chunks, tokens, ingested_at, pinned, size, mtime_ns, kind"
        )
        rows = self.ask(f"SELECT {columns} FROM document {rest}", values)
        return [_document_info(row) for row in rows]

    def sources_beginning(self, prefix: str, most: int) -> list[str]:
        """Documents whose source begins so, in the order of their names, no more than `most`."""
        rows = self.ask(
            "SELECT source FROM document WHERE source >= CAST(? AS TEXT)"
            " AND source < CAST(? AS TEXT) ORDER BY source LIMIT ?",
            (raw(prefix), raw(prefix) + b"\xff", most),
        )
        return [str(row[0]) for row in rows]

    # Chunks.

    def chunks(
        self, source: str | None = None, *, collections: Sequence[str] = ()
    ) -> list[ChunkInfo]:
        """The chunks of one document or of all, in the documents' order and then their own; with
        collections, those of the documents in any of them.

        Raises NotFoundError for a collection that isn't there.
        """
        if collections:
            self.require_collections(collections)
            return self._chunks(
                f"WHERE chunk.source IN ({members(collections)})"
                " ORDER BY place, chunk.source, ordinal",
                collections,
            )
        if source is None:
            return self._chunks("ORDER BY place, chunk.source, ordinal", ())
        return self._chunks("WHERE chunk.source = CAST(? AS TEXT) ORDER BY ordinal", (raw(source),))

    def chunks_between(self, source: str, first: int, last: int) -> list[ChunkInfo]:
        """The chunks of a document from the one with the ordinal `first` to `last`, as far as there
        are any."""
        return self._chunks(
            "WHERE chunk.source = CAST(? AS TEXT) AND ordinal BETWEEN ? AND ? ORDER BY ordinal",
            (raw(source), first, last),
        )

    def chunk(self, prefix: str) -> ChunkInfo:
        """The chunk whose id begins with `prefix`; of several places with that text, the first.

        Raises UsageError for fewer than 4 hex digits and where several chunks begin so,
        NotFoundError where none does.
        """
        wanted = prefix.strip().lower()
        if len(wanted) < MIN_PREFIX or set(wanted) - set("0123456789abcdef"):
            raise UsageError(
                f"{prefix[:80]!r} is not a chunk id: at least {MIN_PREFIX} hex digits of one",
                "cacheblend store ls shows the chunks",
            )
        found = self._chunks(
            "WHERE chunk_id >= ? AND chunk_id < ? ORDER BY place, chunk.source, ordinal",
            (wanted, wanted + "g"),
        )
        ids = sorted({chunk.chunk_id for chunk in found})
        if not ids:
            raise NotFoundError(
                f"no chunk {prefix[:80]!r} in the store", "cacheblend store ls shows the chunks"
            )
        if len(ids) > 1:
            more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
            raise UsageError(
                f"{prefix!r} is the beginning of {len(ids)} chunk ids: "
                + ", ".join(found[:16] for found in ids[:3])
                + more,
                "give more of the id",
            )
        return found[0]

    def chunks_beginning(self, prefix: str, most: int, length: int) -> list[tuple[str, str]]:
        """Ids that begin so, in their order, no more than `most`, each with the first `length`
        characters of its text."""
        rows = self.ask(
            "SELECT chunk_id, substr(text, 1, ?) FROM chunk WHERE chunk_id >= ? AND chunk_id < ?"
            " GROUP BY chunk_id ORDER BY chunk_id LIMIT ?",
            (length, prefix, prefix + "g", most),
        )
        return [(str(name), str(text)) for name, text in rows]

    def places(self, chunk_id: str) -> list[ChunkInfo]:
        """Every place of a chunk, given its whole id, in the documents' order."""
        return self._chunks("WHERE chunk_id = ? ORDER BY place, chunk.source, ordinal", (chunk_id,))

    def altered_chunks(self) -> list[str]:
        """Ids of chunks whose text is no longer the one the id is the hash of."""
        return sorted({c.chunk_id for c in self.chunks() if chunk_id(c.text) != c.chunk_id})

    def known_chunks(self, chunk_ids: Iterable[str]) -> set[str]:
        """Those of the chunk ids that some document has."""
        wanted = list(set(chunk_ids))
        known: set[str] = set()
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            marks = ",".join("?" * len(some))
            rows = self.ask(f"SELECT chunk_id FROM chunk WHERE chunk_id IN ({marks})", some)
            known.update(row[0] for row in rows)
        return known

    def _chunks(self, rest: str, values: Sequence[object]) -> list[ChunkInfo]:
        return [
            _chunk_info(row)
            for row in self.ask(
                f"SELECT {_CHUNK_COLUMNS} FROM chunk JOIN document USING (source) {rest}", values
            )
        ]

    # Models.

    def name_model(self, fingerprint: str, name: str) -> None:
        """Remembers what a model is called."""
        if self.model_name(fingerprint) != name:
            with self.writing() as db:
                db.execute("INSERT OR REPLACE INTO model VALUES (?, ?)", (fingerprint, name))

    def model_name(self, fingerprint: str) -> str | None:
        """The name a model was last given."""
        rows = self.ask("SELECT name FROM model WHERE fingerprint = ?", (fingerprint,))
        return str(rows[0][0]) if rows else None


def _chunk_row(source: str, ordinal: int, chunk: ChunkText) -> tuple[Any, ...]:
    place = chunk.place or Place("", 0, 0)
    return (
        *(raw(source), ordinal, chunk.chunk_id, raw(chunk.text), chunk.tokens),
        *(chunk.start, chunk.end, place.unit, place.first, place.last),
        raw(json.dumps(chunk.headings, ensure_ascii=False)),
    )


def _document_info(row: tuple[Any, ...]) -> DocumentInfo:
    source, digest, settings, chunks, tokens, at, pinned, size, mtime_ns, kind = row
    facts = source, digest, settings, chunks, tokens, at
    return DocumentInfo(*facts, bool(pinned), size, mtime_ns, kind)


def _chunk_info(row: tuple[Any, ...]) -> ChunkInfo:
    chunk_id, text, tokens, source, ordinal, start, end, unit, first, last, headings = row
    place = Place(unit, first, last) if unit else None
    facts = chunk_id, text, tokens, source, ordinal, start, end
    return ChunkInfo(*facts, place, _headings(headings))


def _headings(text: str) -> tuple[str, ...]:
    try:
        return tuple(map(str, json.loads(text)))
    except (ValueError, TypeError) as error:
        raise IntegrityError(
            "the catalog holds headings that were altered", "ingest the documents again"
        ) from error
