"""Writes chosen documents and their KV into an archive."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from blake3 import blake3

from cache_store.archive import (
    END,
    PIECE,
    ArchivedDocument,
    Manifest,
    Member,
    chunk_name,
    member_header,
    opening,
    padded,
)
from cache_store.archived_document import encode_document
from cache_store.catalog import DocumentInfo
from cache_store.errors import (
    CacheblendError,
    DamagedEntry,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from cache_store.results import EntryInfo
from cache_store.store import ChunkStore

PART = ".part"


class _Sink(Protocol):
    def write(self, data: memoryview | bytes, /) -> object: ...


@dataclass(frozen=True)
class ExportPlan:
    """What an archive is going to hold. damaged: what was left out, and why."""

    manifest: Manifest
    damaged: tuple[str, ...]

    @property
    def entries(self) -> int:
        return sum(1 for member in self.manifest.members if member.key)

    @property
    def total(self) -> int:
        """Bytes of the archive."""
        return len(opening(self.manifest)) + self.manifest.total + len(END)


def plan_export(
    store: ChunkStore, sources: Collection[str] | None, models: Collection[str] | None
) -> ExportPlan:
    """Chooses the documents of these sources, None for all and what no document has, and the KV
    of these models' fingerprints, None for every one.

    The entries chosen are protected from eviction until the store is closed. The same choice from
    the same store gives the same plan. Raises NotFoundError for a choice of nothing.
    """
    by_chunk: dict[str, list[EntryInfo]] = {}
    for entry in sorted(store.entries(), key=lambda entry: entry.key):
        if models is None or entry.spec.model in models:
            by_chunk.setdefault(entry.chunk_id, []).append(entry)
    planner = _Planner(store)
    chosen = [d for d in store.catalog.documents() if sources is None or d.source in sources]
    wanted = {c.chunk_id for d in chosen for c in store.catalog.chunks(d.source)}
    if sources is None:
        wanted |= by_chunk.keys()
    models_there = {e.spec.model for name in wanted if name for e in by_chunk.get(name, ())}
    prefixes = by_chunk.pop("", [])
    planner.entries(e for e in prefixes if sources is None or e.spec.model in models_there)
    for document in chosen:
        planner.document(document, by_chunk)
    if sources is None:
        for name in list(by_chunk):
            planner.entries(by_chunk.pop(name))
    if not planner.members:
        raise NotFoundError(
            "there is nothing to export", "cacheblend store ls shows what the store holds"
        )
    return planner.plan()


class _Planner:
    """Collects members in their order, each entry once."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self.members: list[Member] = []
        self._documents: list[ArchivedDocument] = []
        self._models: dict[str, str] = {}
        self._damaged: list[str] = []

    def entries(self, entries: Iterator[EntryInfo] | list[EntryInfo]) -> None:
        for entry in entries:
            self._store.protect(entry.key)
            try:
                with self._store.peek(entry.key) as reader:
                    checksum, size = reader.header_checksum.hex(), len(reader.file)
            except NotFoundError:  # evicted just now
                continue
            except DamagedEntry as error:
                self._damaged.append(error.message)
                continue
            self.members.append(Member(chunk_name(entry.key), size, checksum))
            name = self._store.catalog.model_name(entry.spec.model)
            if name is not None:
                self._models[entry.spec.model] = name

    def document(self, info: DocumentInfo, by_chunk: dict[str, list[EntryInfo]]) -> None:
        """A document after the entries of its chunks, which are taken out of `by_chunk`."""
        chunks = self._store.catalog.chunks(info.source)
        for chunk in chunks:
            self.entries(by_chunk.pop(chunk.chunk_id, []))
        document = ArchivedDocument(info.source, info.digest, info.settings)
        body = encode_document(info, chunks)
        self.members.append(Member(document.member, len(body), blake3(body).hexdigest()))
        self._documents.append(document)

    def plan(self) -> ExportPlan:
        manifest = Manifest(tuple(self.members), tuple(self._documents), self._models)
        return ExportPlan(manifest, tuple(self._damaged))


def export_to(
    store: ChunkStore, plan: ExportPlan, sink: _Sink, on_bytes: Callable[[int], None]
) -> None:
    """Writes the archive, without ever holding more than a document's text. on_bytes: told the
    bytes written so far.

    Raises as `_body` does, and OSError as the sink does.
    """
    done = 0
    for piece in _pieces(store, plan):
        sink.write(piece)
        on_bytes(done := done + len(piece))


@dataclass(frozen=True)
class Exported:
    """bytes of the archive; kept: of them, those that an earlier run had written."""

    nbytes: int
    kept: int


def export_file(
    store: ChunkStore, plan: ExportPlan, path: Path, on_bytes: Callable[[int], None]
) -> Exported:
    """Writes the archive to a file that is there once it is whole. Until then it is `path`.part;
    what is good of one that an earlier run left behind is kept.

    Raises UsageError where another process writes it, and as `export_to` does.
    """
    part = path.with_name(path.name + PART)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(part, flags, 0o600), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process writes {part}", "wait for its end") from None
        if not part.exists() or not os.path.samestat(os.fstat(file.fileno()), part.lstat()):
            raise UsageError(f"another process has just written {path}", "look whether it is good")
        done, kept, checking = 0, 0, True
        for piece in _pieces(store, plan):
            if checking and _compare(file, piece):
                kept += len(piece)
            else:
                if checking:  # from here on it is another, or there is no more
                    checking = False
                    file.seek(done)
                    file.truncate()
                file.write(piece)
            on_bytes(done := done + len(piece))
        file.truncate(done)
        file.flush()
        os.fsync(file.fileno())
        part.replace(path)
    return Exported(done, kept)


def _compare(file: BinaryIO, piece: memoryview | bytes) -> bool:
    return file.read(len(piece)) == piece


def _pieces(store: ChunkStore, plan: ExportPlan) -> Iterator[memoryview | bytes]:
    """The archive, a piece after the other."""
    manifest = plan.manifest
    yield from _cut(memoryview(opening(manifest)))
    documents = {document.member: document for document in manifest.documents}
    for member in manifest.members:
        yield member_header(member.name, member.size)
        if member.key:
            yield from _entry(store, member)
        else:
            yield from _document(store, member, documents[member.name])
        if filling := padded(member.size) - member.size:
            yield bytes(filling)
    yield END


def _entry(store: ChunkStore, member: Member) -> Iterator[memoryview]:
    """A chunk file's bytes, every layer of it checked before the first goes out."""
    try:
        with store.peek(member.key) as reader:
            reader.verify()
            if (len(reader.file), reader.header_checksum.hex()) != (member.size, member.checksum):
                raise _changed(f"entry {member.key[:12]} was replaced")
            yield from _cut(reader.file)
    except NotFoundError as error:
        raise _changed(f"entry {member.key[:12]} was removed") from error
    except DamagedEntry as error:
        raise IntegrityError(
            error.message, "cacheblend store verify --repair removes it; then export again"
        ) from error


def _document(store: ChunkStore, member: Member, promised: ArchivedDocument) -> Iterator[bytes]:
    info = store.catalog.document(promised.source)
    body = encode_document(info, store.catalog.chunks(info.source)) if info else b""
    if blake3(body).hexdigest() != member.checksum:
        raise _changed(f"document {promised.source} was changed or removed")
    yield body


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _changed(what: str) -> CacheblendError:
    return CacheblendError(f"{what} while the archive was written", "run the same command again")
