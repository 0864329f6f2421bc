"""The catalog: which documents were ingested, and the text of their chunks."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cache_store.database import (
    BUSY_SECONDS,
    CHECKPOINT_PAGES,
    WAL_ALLOWANCE,
    check_files,
    connect_read_only,
    guarded,
    is_writable,
    patiently,
    prepare_file,
    start_anew,
)
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.schema import VERSION, bring_up, version_of

CATALOG_NAME = "catalog.db"
MIN_PREFIX = 4
_AT_ONCE = 500  # values in one query
Claim = Callable[[int], AbstractContextManager[None]]
"""Within one, so many more bytes may be written to the store."""

_CHUNK_COLUMNS = "chunk_id, text, chunk.tokens, chunk.source, ordinal, start, stop"


@dataclass(frozen=True)
class ChunkText:
    """A chunk as a document was cut. start, end: character offsets in the document."""

    chunk_id: str
    text: str
    start: int
    end: int
    tokens: int


@dataclass(frozen=True)
class DocumentInfo:
    """A document as it was ingested. digest: of its bytes; settings: JSON of how it was cut;
    ingested_at: seconds since the epoch. pinned: its chunks are never evicted."""

    source: str
    digest: str
    settings: str
    chunks: int
    tokens: int
    ingested_at: float
    pinned: bool = False


@dataclass(frozen=True)
class ChunkInfo:
    """A chunk and its place: the ordinal-th of its document, characters [start, end)."""

    chunk_id: str
    text: str
    tokens: int
    source: str
    ordinal: int
    start: int
    end: int


class Catalog:
    """One SQLite file next to the entries; several threads and processes may use it.

    Methods raise IntegrityError for a damaged file and CacheblendError for a locked or full one.
    """

    def __init__(self, path: Path, *, read_only: bool, claim: Claim | None = None) -> None:
        """claim: text is written within one of that many bytes; may raise."""
        self.path = path
        self._claim = claim or (lambda size: contextlib.nullcontext())
        self._lock = threading.RLock()
        with guarded(path):
            if read_only:
                check_files(path)
                self._db = _connect_read_only(path)
            else:
                prepare_file(path)
                self._db = _connect(path)
            try:
                self._set_up(read_only)
            except BaseException:
                self._db.close()
                raise

    def _set_up(self, read_only: bool) -> None:
        if not read_only:
            patiently(lambda: self._db.execute("PRAGMA journal_mode = wal"))
        self._db.execute("PRAGMA synchronous = normal")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit = {WAL_ALLOWANCE}")
        # Names of files may hold what isn't UTF-8; it comes back as it was given.
        self._db.text_factory = _decoded
        self._prepare(read_only)

    def _prepare(self, read_only: bool) -> None:
        version = version_of(self._db)
        if version is not None and version < VERSION and not read_only:
            with self.writing(count=False):
                version = version_of(self._db)  # another process may have been at it
                if version is not None and version < VERSION:
                    bring_up(self._db, version)
                    version = VERSION
        if version == 0 and read_only:  # one that was never written
            bring_up(self._db, 0)
        elif version != VERSION:
            older = version is not None and version < VERSION
            raise IntegrityError(
                f"{self.path} has catalog version {version}, this is {VERSION}",
                "make its folder writable and use it once" if older else start_anew(self.path),
            )

    @contextlib.contextmanager
    def writing(self, *, count: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction: all that is written within happens or none of it. count: as a change of
        documents or models, which `revision` tells of."""
        with self._lock, guarded(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                if count:
                    self._db.execute("UPDATE revision SET value = value + 1")
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.rollback()

    def ask(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows that answer a query."""
        with self._lock, guarded(self.path):
            return self._db.execute(sql, values).fetchall()

    @property
    def revision(self) -> int:
        """A number that changes with every write."""
        return int(self.ask("SELECT value FROM revision")[0][0])

    # Documents.

    def replace_document(
        self, source: str, digest: str, settings: str, chunks: Sequence[ChunkText]
    ) -> None:
        """Records a document and its chunks in the place of what was recorded of it, in one step.

        A replaced document keeps its place among the others. Raises StoreFullError where the
        text doesn't fit under the store's limit.
        """
        rows = [
            (_raw(source), n, c.chunk_id, _raw(c.text), c.tokens, c.start, c.end)
            for n, c in enumerate(chunks)
        ]
        # Once in the log and once in the database, with their indexes.
        size = 2 * sum(len(row[3]) + 2 * len(row[0]) + 400 for row in rows) + 2**16
        tokens = sum(chunk.tokens for chunk in chunks)
        with self._claim(size), self._shortened(), self.writing() as db:
            found = db.execute(
                "SELECT place FROM document WHERE source = CAST(? AS TEXT)", (_raw(source),)
            ).fetchall()
            if not found:
                found = db.execute("SELECT coalesce(max(place), 0) + 1 FROM document").fetchall()
            db.execute("DELETE FROM chunk WHERE source = CAST(? AS TEXT)", (_raw(source),))
            db.execute(
                "INSERT INTO document (source, digest, settings, chunks, tokens, ingested_at,"
                " place) VALUES (CAST(? AS TEXT), ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (source) DO UPDATE SET"
                " digest = excluded.digest, settings = excluded.settings,"
                " chunks = excluded.chunks, tokens = excluded.tokens,"
                " ingested_at = excluded.ingested_at",
                (_raw(source), digest, settings, len(rows), tokens, time.time(), found[0][0]),
            )
            db.executemany(
                "INSERT INTO chunk (source, ordinal, chunk_id, text, tokens, start, stop)"
                " VALUES (CAST(? AS TEXT), ?, ?, CAST(? AS TEXT), ?, ?, ?)",
                rows,
            )

    @contextlib.contextmanager
    def _shortened(self) -> Iterator[None]:
        """Around a large transaction: its log is written back and cut."""
        yield
        with guarded(self.path):
            if self.path.with_name(self.path.name + "-wal").stat().st_size > WAL_ALLOWANCE:
                self.ask("PRAGMA wal_checkpoint(TRUNCATE)")

    def remove_document(self, source: str) -> bool:
        """Forgets a document and its chunks; whether there was one."""
        with self._shortened(), self.writing() as db:
            db.execute("DELETE FROM chunk WHERE source = CAST(? AS TEXT)", (_raw(source),))
            gone = db.execute(
                "DELETE FROM document WHERE source = CAST(? AS TEXT)", (_raw(source),)
            )
            return gone.rowcount > 0

    def document(self, source: str) -> DocumentInfo | None:
        """What is recorded of a document."""
        return next(iter(self._documents("WHERE source = CAST(? AS TEXT)", (_raw(source),))), None)

    def documents(self) -> list[DocumentInfo]:
        """All documents, in the order they were first ingested."""
        return self._documents("ORDER BY place, source", ())

    def _documents(self, rest: str, values: Sequence[object]) -> list[DocumentInfo]:
        columns = "source, digest, settings, chunks, tokens, ingested_at, pinned"
        rows = self.ask(f"SELECT {columns} FROM document {rest}", values)
        return [replace(DocumentInfo(*row[:-1]), pinned=bool(row[-1])) for row in rows]

    # Chunks.

    def chunks(self, source: str | None = None) -> list[ChunkInfo]:
        """The chunks of one document or of all, in the documents' order and then their own."""
        if source is None:
            return self._chunks("ORDER BY place, chunk.source, ordinal", ())
        return self._chunks(
            "WHERE chunk.source = CAST(? AS TEXT) ORDER BY ordinal", (_raw(source),)
        )

    def chunk(self, prefix: str) -> ChunkInfo:
        """The chunk whose id begins with `prefix`; of several places with that text, the first.

        Raises UsageError for fewer than 4 hex digits and where several chunks begin so,
        NotFoundError where none does.
        """
        wanted = prefix.strip().lower()
        if len(wanted) < MIN_PREFIX or set(wanted) - set("0123456789abcdef"):
            raise UsageError(
                f"{prefix!r} is not a chunk id: at least {MIN_PREFIX} hex digits of one",
                "cacheblend store ls shows the chunks",
            )
        found = self._chunks(
            "WHERE chunk_id >= ? AND chunk_id < ? ORDER BY place, chunk.source, ordinal",
            (wanted, wanted + "g"),
        )
        ids = sorted({chunk.chunk_id for chunk in found})
        if not ids:
            raise NotFoundError(
                f"no chunk {prefix!r} in the store", "cacheblend store ls shows the chunks"
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
            ChunkInfo(*row)
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

    @property
    def file_bytes(self) -> int:
        """Length of the file once what is in its log is written back."""
        return int(self.ask("PRAGMA page_count")[0][0]) * 4096

    def check(self) -> str:
        """What SQLite finds wrong with the file; empty if nothing."""
        try:
            found = self.ask("PRAGMA quick_check(1)")
        except IntegrityError as error:
            return error.message
        return "" if found == [("ok",)] else f"{self.path.name}: {found[0][0]}"

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection to a catalog that cannot be written; an empty one where none was made. One of
    an older version is brought up first, where that can be."""
    if path.exists():
        connection = connect_read_only(path)
        try:
            version = version_of(connection)
        except BaseException:
            connection.close()
            raise
        if version and version < VERSION and is_writable(path.parent):
            connection.close()
            Catalog(path, read_only=False).close()
            connection = connect_read_only(path)
        if version != 0:
            return connection
        connection.close()
    return _connect(":memory:")


def _connect(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _raw(text: str) -> bytes:
    """Text as SQLite is to keep it, whatever it holds."""
    return text.encode("utf-8", "surrogatepass")


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise IntegrityError(
            "the catalog holds text that was altered", "ingest the documents again"
        ) from error
