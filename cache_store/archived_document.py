"""A document as an archive holds it: where it was, how it was cut, and its chunks' text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cache_store.archive import ArchivedDocument, as_json, bad
from cache_store.catalog import Catalog, ChunkInfo, ChunkText, DocumentInfo, Place
from cache_store.collection_name import is_collection_name
from cache_store.keys import chunk_id

_MAX_NUMBER = 2**53
_WORD = re.compile(r"[a-z][a-z0-9]{0,39}")
_KIND = re.compile(r"[a-z0-9][a-z0-9.+#_-]{0,39}|")


@dataclass(frozen=True)
class DocumentContent:
    """What a member holds of a document besides what the manifest says. kind: as in
    `DocumentInfo`; collections: the names of those it is in."""

    chunks: tuple[ChunkText, ...]
    kind: str = ""
    collections: tuple[str, ...] = ()


def archive_document(catalog: Catalog, info: DocumentInfo) -> bytes:
    """The member's bytes, for a document of this catalog."""
    return _encode(info, catalog.chunks(info.source), catalog.collections_of(info.source))


def _encode(info: DocumentInfo, chunks: Sequence[ChunkInfo], collections: Sequence[str]) -> bytes:
    """Places, headings and the like are keys of their own, and only where there are some: who
    doesn't know them reads the rest."""
    row: dict[str, Any] = {
        "source": info.source,
        "digest": info.digest,
        "settings": info.settings,
        "chunks": [[c.chunk_id, c.start, c.end, c.tokens, c.text] for c in chunks],
    }
    if info.kind:
        row["kind"] = info.kind
    if any(chunk.place for chunk in chunks):
        places = [chunk.place for chunk in chunks]
        row["places"] = [[p.unit, p.first, p.last] if p else None for p in places]
    if any(chunk.headings for chunk in chunks):
        row["headings"] = [chunk.headings for chunk in chunks]
    if collections:
        row["collections"] = list(collections)
    return as_json(row)


def decode_document(data: bytes, promised: ArchivedDocument) -> DocumentContent:
    """Its chunks, each with the text its id is the hash of, and what else is told of it. Raises
    IntegrityError where the document is not the one the manifest promised."""
    name = promised.member
    try:
        row = json.loads(data)
        found = ArchivedDocument(row["source"], row["digest"], row["settings"])
        chunks = [_chunk(*item) for item in row["chunks"]]
        content = _content(row, chunks)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise bad(name, "it can't be understood") from error
    if found != promised:
        raise bad(name, "it is another document than the manifest says")
    return content


def _chunk(name: object, start: object, end: object, tokens: object, text: object) -> ChunkText:
    if not isinstance(text, str) or chunk_id(text) != name:
        raise ValueError("a text that isn't its id's")
    numbers = [n for n in (start, end, tokens) if type(n) is int and 0 <= n < _MAX_NUMBER]
    if len(numbers) != 3:
        raise ValueError("an impossible place")
    return ChunkText(chunk_id(text), text, numbers[0], numbers[1], numbers[2])


def _content(row: Mapping[str, Any], chunks: Sequence[ChunkText]) -> DocumentContent:
    nothing = [None] * len(chunks)
    places, headings = row.get("places", nothing), row.get("headings", nothing)
    kind, collections = row.get("kind", ""), row.get("collections", [])
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise ValueError("no kind of document")
    if not isinstance(collections, list):
        raise ValueError("no list of collections")
    if not all(isinstance(name, str) and is_collection_name(name) for name in collections):
        raise ValueError("no name of a collection")
    told = zip(chunks, places, headings, strict=True)
    whole = [replace(c, place=_place(p), headings=_headings(h)) for c, p, h in told]
    return DocumentContent(tuple(whole), kind, tuple(collections))


def _place(item: Any) -> Place | None:
    if item is None:
        return None
    unit, first, last = item
    if not isinstance(unit, str) or not _WORD.fullmatch(unit):
        raise ValueError("no unit of places")
    if not _is_number(first) or not _is_number(last) or first > last:
        raise ValueError("an impossible place")
    return Place(unit, first, last)


def _headings(item: Any) -> tuple[str, ...]:
    if item is None:
        return ()
    if not isinstance(item, list) or not all(isinstance(heading, str) for heading in item):
        raise ValueError("headings that are no texts")
    return tuple(item)


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER
