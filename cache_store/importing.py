"""Takes what an archive holds into a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from cache_store.archive import ArchivedDocument, ArchiveReader, Member, bad
from cache_store.archived_document import decode_document
from cache_store.catalog import DocumentInfo
from cache_store.errors import DamagedEntry, IntegrityError, UsageError
from cache_store.space import ROW_HEADROOM, round_up
from cache_store.store import ChunkStore

Conflict = Literal["refuse", "replace", "keep"]
"""What becomes of a document that the store has in another version."""

_ROW_BYTES = 2 * 4096  # an entry's rows in the index, or a document's in the catalog


@dataclass
class ImportReport:
    """What has been done so far. kept: what was there already, or was to stay as it is."""

    entries: int = 0
    entry_bytes: int = 0
    kept_entries: int = 0
    documents: int = 0
    kept_documents: int = 0
    replaced_documents: int = 0


class Import:
    """One archive on its way into a store. Made, it has refused what can be refused; `run` does
    the work, and can be stopped at any moment and done again.

    Raises UsageError where the archive has other versions of documents than the store and
    `conflict` is "refuse", StoreFullError where it doesn't fit.
    """

    def __init__(
        self, store: ChunkStore, reader: ArchiveReader, *, conflict: Conflict = "refuse"
    ) -> None:
        store.require_writable()
        self._store, self._conflict, self._reader = store, conflict, reader
        self.manifest = reader.manifest
        self._documents = {document.member: document for document in self.manifest.documents}
        self._kept = self._settled()
        self._require_room()
        self.report = ImportReport()

    def _settled(self) -> set[str]:
        """Members of documents that stay as they are in the store."""
        kept, others = set(), []
        for document in self.manifest.documents:
            known = self._store.catalog.document(document.source)
            if known is None:
                continue
            if _version(known) == _version(document):
                kept.add(document.member)
            else:
                others.append(document.source)
        if others and self._conflict == "refuse":
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise UsageError(
                f"the store has another version of {others[0]}{more}",
                "--replace takes the archive's, --keep leaves the store's as it is",
            )
        if self._conflict == "keep":
            kept |= {d.member for d in self.manifest.documents if d.source in others}
        return kept

    def _require_room(self) -> None:
        """Whether all of it fits under the limit, beside what of it is there already."""
        held = [m.key for m in self.manifest.members if m.key and self._is_held(m)]
        there, needed = set(held), ROW_HEADROOM
        for member in self.manifest.members:
            if member.key and member.key not in there:
                needed += round_up(member.size) + _ROW_BYTES
            elif not member.key and member.name not in self._kept:
                needed += 2 * round_up(member.size) + _ROW_BYTES
        self._store.require_room(needed, keep=there)
        for key in held:
            self._store.protect(key)

    def _is_held(self, member: Member) -> bool:
        return self._store.header(member.key) is not None

    def run(self) -> ImportReport:
        """Takes in one member after the other; a document once all before it are in.

        Raises IntegrityError, naming the member, for one that is not what it should be; what came
        before it stays.
        """
        for fingerprint, name in self.manifest.models.items():
            if self._store.catalog.model_name(fingerprint) is None:
                self._store.catalog.name_model(fingerprint, name)
        for member in self.manifest.members:
            self._reader.begin(member)
            if member.key:
                self._entry(member)
            else:
                self._document(member, self._documents[member.name])
        self._reader.end()
        return self.report

    def _entry(self, member: Member) -> None:
        if self._is_held(member):
            self._reader.skip(member)
            self._store.protect(member.key)
            self.report.kept_entries += 1
            return
        try:
            content = self._reader.content(member)
            self._store.adopt(member.key, member.size, bytes.fromhex(member.checksum), content)
        except DamagedEntry as error:
            raise bad(member.name, _what(error)) from error
        self._store.protect(member.key)
        self.report.entries += 1
        self.report.entry_bytes += member.size

    def _document(self, member: Member, promised: ArchivedDocument) -> None:
        catalog, source = self._store.catalog, promised.source
        known = catalog.document(source)
        same = known is not None and _version(known) == _version(promised)
        if member.name in self._kept and not same:
            self._reader.skip(member)
            self.report.kept_documents += 1
            return
        body = b"".join(self._reader.content(member))
        if blake3(body).hexdigest() != member.checksum:
            raise bad(member.name, "it is not what was written")
        content = decode_document(body, promised)
        if member.name in self._kept:  # the same: only what it is grouped with may be new
            for name in set(content.collections).difference(catalog.collections_of(source)):
                catalog.collect(name, [source])
            self.report.kept_documents += 1
            return
        before = {chunk.chunk_id for chunk in catalog.chunks(source)}
        replaced = known is not None
        catalog.replace_document(
            *(source, promised.digest, promised.settings, content.chunks),
            kind=content.kind,
            collections=content.collections,
        )
        discard_unknown(self._store, sorted(before))
        self.report.documents += 1
        self.report.replaced_documents += replaced


def _version(document: DocumentInfo | ArchivedDocument) -> tuple[str, str]:
    """What two documents of one name have in common if they are the same."""
    return document.digest, document.settings


def discard_unknown(store: ChunkStore, chunk_ids: Sequence[str]) -> int:
    """Removes the KV of those of the chunks that no document has any more; bytes freed."""
    known = store.catalog.known_chunks(chunk_ids)
    gone = [name for name in chunk_ids if name not in known]
    return sum(store.discard(key) for name in gone for key in store.keys_of_chunk(name))


def _what(error: IntegrityError) -> str:
    """What is wrong with a chunk file, without the name it has for the moment."""
    words = error.message.split(" ")
    if words[:2] == ["chunk", "file"]:
        return "it " + " ".join(words[3:])
    return error.message
