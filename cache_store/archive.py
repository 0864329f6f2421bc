"""The archive that documents and their KV travel in: a plain tar file, its contents told first.

    manifest.json           what follows, in its order: names, sizes, checksums
    manifest.blake3         64 hex digits: of the manifest
    chunks/KEY.kv           a chunk file as it is in the store, before the documents that need it
    documents/NAME.json     a document and its chunks' text; NAME is the blake3 of its source

Members are plain files in the ustar form with GNU sizes, and nothing but what the manifest names,
once each and in its order, may be there. So all names and sizes are known, and can be refused,
before a byte is unpacked; and a file that is half written or half read can be gone on with. A
chunk file's checksum is that of its header, which holds those of its layers; a document's is its
blake3.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from blake3 import blake3

from cache_store.errors import IntegrityError

FORMAT, VERSION = "cacheblend archive", 1
MANIFEST, SEAL = "manifest.json", "manifest.blake3"
SEAL_BYTES = 64
MAX_MANIFEST = 2**28
MAX_DOCUMENT = 2**30
MAX_CHUNK = 2**42
MIN_CHUNK = 128
BLOCK = 512
PIECE = 2**20
END = bytes(2 * BLOCK)

_CHUNK = re.compile(r"chunks/([0-9a-f]{64})\.kv")
_DOCUMENT = re.compile(r"documents/([0-9a-f]{64})\.json")
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_CHECKSUM_DIGITS = {"chunk": 32, "document": 64}
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a link",
    tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
    tarfile.GNUTYPE_LONGNAME: "a long name",
    tarfile.GNUTYPE_LONGLINK: "a long link",
    tarfile.XHDTYPE: "an extended header",
    tarfile.XGLTYPE: "an extended header",
}


class Stream(Protocol):
    """Where an archive is read from."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Member:
    """A file of the archive. checksum: hex digits."""

    name: str
    size: int
    checksum: str

    @property
    def key(self) -> str:
        """The entry's key; empty for a document."""
        found = _CHUNK.fullmatch(self.name)
        return found[1] if found else ""

    @property
    def total(self) -> int:
        """Bytes in the archive, the header and what fills the last block up included."""
        return BLOCK + padded(self.size)


@dataclass(frozen=True)
class ArchivedDocument:
    """What the manifest tells of a document, so that it can be refused before any work."""

    source: str
    digest: str
    settings: str

    @property
    def member(self) -> str:
        return document_name(self.source)


@dataclass(frozen=True)
class Manifest:
    """What an archive holds. models: names by fingerprint."""

    members: tuple[Member, ...]
    documents: tuple[ArchivedDocument, ...]
    models: Mapping[str, str]

    @property
    def total(self) -> int:
        """Bytes of all members in the archive."""
        return sum(member.total for member in self.members)

    def encode(self) -> bytes:
        row = {
            "format": FORMAT,
            "version": VERSION,
            "models": dict(sorted(self.models.items())),
            "documents": [[d.source, d.digest, d.settings] for d in self.documents],
            "members": [[m.name, m.size, m.checksum] for m in self.members],
        }
        return json.dumps(row, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Raises IntegrityError for anything that `encode` wouldn't write."""
        try:
            row = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise bad(MANIFEST, "it can't be understood") from error
        try:
            if not isinstance(row, dict) or row.get("format") != FORMAT:
                raise ValueError("it is not one of ours")
            version = row.get("version")
            if type(version) is int and version > VERSION:
                raise IntegrityError(
                    "the archive is of a later version than this cacheblend knows",
                    "use a newer cacheblend",
                )
            if version != VERSION:
                raise ValueError("it has no version that there is")
            members = tuple(_member(*item) for item in row["members"])
            documents = tuple(_document(*item) for item in row["documents"])
            models = row["models"]
            for text in (*models, *models.values()):
                _text(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = str(error) if isinstance(error, ValueError) else "it can't be understood"
            raise bad(MANIFEST, why[:200]) from error
        names = [member.name for member in members]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise bad(MANIFEST, f"it names {twice} twice")
        there = {name for name in names if _DOCUMENT.fullmatch(name)}
        if {d.member for d in documents} != there or len(documents) != len(there):
            raise bad(MANIFEST, "its documents are not those of its members")
        return cls(members, documents, dict(models))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it holds something else where text should be")
    return value


def _document(source: object, digest: object, settings: object) -> ArchivedDocument:
    return ArchivedDocument(_text(source), _text(digest), _text(settings))


def _member(name: object, size: object, checksum: object) -> Member:
    text = _text(name)
    kind = "chunk" if _CHUNK.fullmatch(text) else "document" if _DOCUMENT.fullmatch(text) else ""
    if not kind:
        raise ValueError(f"it names a file that can't be one of ours: {text[:80]!r}")
    low, high = (MIN_CHUNK, MAX_CHUNK) if kind == "chunk" else (2, MAX_DOCUMENT)
    if type(size) is not int or not low <= size <= high:
        raise ValueError(f"it says an impossible size of {text}")
    digits = _text(checksum)
    if not _HEX.fullmatch(digits) or len(digits) != _CHECKSUM_DIGITS[kind]:
        raise ValueError(f"it has no checksum of {text}")
    return Member(text, size, digits)


def document_name(source: str) -> str:
    """The member that holds the document."""
    return f"documents/{blake3(source.encode('utf-8', 'surrogatepass')).hexdigest()}.json"


def chunk_name(key: str) -> str:
    """The member that holds the entry."""
    return f"chunks/{key}.kv"


def padded(size: int) -> int:
    """`size` in whole blocks."""
    return -(-size // BLOCK) * BLOCK


def bad(member: str, what: str) -> IntegrityError:
    """What is wrong with a member, in one line."""
    return IntegrityError(
        f"the archive is damaged at {member}: {what}",
        "get it again, then run the same command: what is in already is passed over",
    )


def member_header(name: str, size: int) -> bytes:
    """A member's header block."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def opening(manifest: Manifest) -> bytes:
    """The beginning of an archive: the manifest and its seal."""
    body = manifest.encode()
    seal = blake3(body).hexdigest().encode()
    return b"".join(
        member_header(name, len(data)) + data.ljust(padded(len(data)), b"\0")
        for name, data in ((MANIFEST, body), (SEAL, seal))
    )


class ArchiveReader:
    """Reads an archive: made, its manifest, then the members in their order. on_bytes: told of
    the bytes read so far.

    All of it raises IntegrityError, naming the member, for anything but what is to come.
    """

    def __init__(self, stream: Stream, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        self._stream, self._on_bytes = stream, on_bytes
        self._done = 0
        self.manifest = self._manifest()

    def _manifest(self) -> Manifest:
        try:
            size = self._header(MANIFEST)
        except IntegrityError as error:
            raise IntegrityError(
                "this is no archive of cacheblend, or its beginning is damaged",
                "cacheblend store export writes one",
            ) from error
        if size > MAX_MANIFEST:
            raise bad(MANIFEST, f"it says to be of {size} bytes")
        body = b"".join(self._content(MANIFEST, size))
        if self._header(SEAL) != SEAL_BYTES:
            raise bad(SEAL, "it has another size")
        seal = b"".join(self._content(SEAL, SEAL_BYTES))
        if blake3(body).hexdigest().encode() != seal:
            raise bad(MANIFEST, "it is not what was written")
        return Manifest.decode(body)

    def begin(self, member: Member) -> None:
        """Reads the header of the member that is to come next."""
        size = self._header(member.name)
        if size != member.size:
            raise bad(member.name, f"it is of {size} bytes, not {member.size}")

    def content(self, member: Member) -> Iterator[bytes]:
        """The bytes of the member that was begun, in pieces."""
        return self._content(member.name, member.size)

    def skip(self, member: Member) -> None:
        """Passes over the bytes of the member that was begun; its end is there."""
        rest = padded(member.size)
        seek = getattr(self._stream, "seek", None)
        if seek is not None and self._stream.seekable():  # type: ignore[attr-defined]
            seek(rest - BLOCK, 1)
            self._done += rest - BLOCK
            rest = BLOCK
        while rest:
            rest -= len(self._exactly(min(PIECE, rest), member.name))
        self._on_bytes(self._done)

    def end(self) -> None:
        """Makes sure that nothing comes after the last member."""
        what = "its end"
        if self._exactly(len(END), what) != END:
            raise bad(what, "it goes on with what the manifest doesn't name")
        filling = 0
        while piece := self._stream.read(PIECE):
            filling += len(piece)
            if piece.strip(b"\0") or filling > PIECE:
                raise bad(what, "data follows it")

    def _header(self, expected: str) -> int:
        block = self._exactly(BLOCK, expected)
        if not block.strip(b"\0"):
            raise bad(expected, "the archive ends before it")
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise bad(expected, "there is no file of an archive here") from error
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise bad(expected, f"in its place is {_KINDS.get(info.type, 'something else')}")
        if info.name != expected:
            raise bad(expected, f"in its place is {info.name[:80]!r}")
        if info.size < 0:
            raise bad(expected, "it says an impossible size")
        return info.size

    def _content(self, name: str, size: int) -> Iterator[bytes]:
        left = size
        while left:
            piece = self._exactly(min(PIECE, left), name)
            left -= len(piece)
            yield piece
        if self._exactly(padded(size) - size, name).strip(b"\0"):
            raise bad(name, "its last block is filled up with something")
        self._on_bytes(self._done)

    def _exactly(self, size: int, name: str) -> bytes:
        """So many bytes of the stream, which may come in smaller pieces."""
        pieces, left = [], size
        while left:
            piece = self._stream.read(left)
            if not piece:
                raise bad(name, "the archive ends in the middle of it")
            pieces.append(piece)
            left -= len(piece)
        self._done += size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def as_json(value: Any) -> bytes:
    """A document's body. Text that isn't UTF-8 is escaped, as JSON allows."""
    return json.dumps(value, separators=(",", ":")).encode()
