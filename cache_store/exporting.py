"""Writes chosen documents and their KV into an archive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
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
from cache_store.archived_document import archive_document
from cache_store.catalog import DocumentInfo
from cache_store.errors import (
    CacheblendError,
    DamagedEntry,
    IntegrityError,
    NotFoundError,
    UnreadableEntry,
    UsageError,
)
from cache_store.results import EntryInfo
from cache_store.store import ChunkStore

PART = ".part"


class _Sink(Protocol):
    def write(self, data: memoryview | bytes, /) -> object: ...


@dataclass(frozen=True)
class ExportPlan:
    """What an archive is going to hold. damaged: what was left out for what it is or as it can't
    be read, and why."""

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
    store: ChunkStore,
    sources: Collection[str] | None,
    models: Collection[str] | None,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> ExportPlan:
    """Chooses the documents of these sources, None for all and what no document has, but for chunks
    that only prompts saved; and the KV of these models' fingerprints, None for every one.

    Every byte of the entries is checked, for an archive begins with what it holds; on_bytes: told
    the bytes checked so far. The entries chosen are protected from eviction until the store is
    closed. The same choice from the same store gives the same plan. Raises NotFoundError for a
    choice of nothing, IntegrityError where nothing of it is sound.
    """
    by_chunk: dict[str, list[EntryInfo]] = {}
    known = {chunk.chunk_id for chunk in store.catalog.chunks()}
    for entry in sorted(store.entries(), key=lambda entry: entry.key):
        one_off = entry.saved and entry.chunk_id and entry.chunk_id not in known
        if not one_off and (models is None or entry.spec.model in models):
            by_chunk.setdefault(entry.chunk_id, []).append(entry)
    planner = _Planner(store, on_bytes)
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
        if planner.damaged:
            raise IntegrityError(planner.damaged[0], "nothing else was chosen")
        raise NotFoundError(
            "there is nothing to export", "cacheblend store ls shows what the store holds"
        )
    return planner.plan()


class _Planner:
    """Collects members in their order, each entry once."""

    def __init__(self, store: ChunkStore, on_bytes: Callable[[int], None]) -> None:
        self._store, self._on_bytes = store, on_bytes
        self.members: list[Member] = []
        self.damaged: list[str] = []
        self._checked = 0
        self._documents: list[ArchivedDocument] = []
        self._models: dict[str, str] = {}

    def entries(self, entries: Iterator[EntryInfo] | list[EntryInfo]) -> None:
        for entry in entries:
            self._store.protect(entry.key)
            try:
                with self._store.peek(entry.key) as reader:
                    reader.verify()
                    checksum, size = reader.header_checksum.hex(), len(reader.file)
            except NotFoundError:  # evicted just now
                continue
            except (DamagedEntry, UnreadableEntry) as error:
                self.damaged.append(error.message)
                continue
            self._checked += size
            self._on_bytes(self._checked)
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
        body = archive_document(self._store.catalog, info)
        self.members.append(Member(document.member, len(body), blake3(body).hexdigest()))
        self._documents.append(document)

    def plan(self) -> ExportPlan:
        manifest = Manifest(tuple(self.members), tuple(self._documents), self._models)
        return ExportPlan(manifest, tuple(self.damaged))


def export_target(path: Path, store: Path) -> Path:
    """The file that an export to `path` makes or replaces: what a link leads to.

    Raises UsageError for what can't be written: a folder, a device or a pipe, and anything beneath
    the folder of the store, whose own files are there.
    """
    try:
        # Of a new file only its folder has to be there.
        real = path.resolve() if path.is_symlink() else path.parent.resolve() / path.name
        parent = real.parent.stat()
    except FileNotFoundError:
        raise UsageError(f"there is no folder {path.absolute().parent}", "make it first") from None
    except RuntimeError:
        raise UsageError(f"{path} is a link to itself", "name another file") from None
    if not stat.S_ISDIR(parent.st_mode):
        raise UsageError(f"{real.parent} is not a folder", "name another file")
    if real.is_dir():
        raise UsageError(f"{path} is a folder", "name a file in it")
    for file in (real, real.with_name(real.name + PART)):
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            hint = "name another one, or write to standard output (-)"
            raise UsageError(f"{path if file == real else file} is not a regular file", hint)
    if real.is_relative_to(store.resolve()):
        raise UsageError(f"{path} is in the folder of the store", "name a file elsewhere")
    return real


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

    Raises UsageError where another process writes it or `export_target` does, and as `export_to`
    does; OSError names the file.
    """
    path = export_target(path, store.path)
    part = path.with_name(path.name + PART)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with _naming(part), os.fdopen(os.open(part, flags, 0o600), "r+b") as file:
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


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError of writing gets the name of the file that was written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CacheblendError(
                f"{path}: {error.strerror}",
                "free some space and run the same command again to go on, or name a file elsewhere",
            ) from error
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


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
    body = archive_document(store.catalog, info) if info else b""
    if blake3(body).hexdigest() != member.checksum:
        raise _changed(f"document {promised.source} was changed or removed")
    yield body


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _changed(what: str) -> CacheblendError:
    return CacheblendError(f"{what} while the archive was written", "run the same command again")
