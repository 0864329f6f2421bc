"""A document as an archive holds it: where it was, how it was cut, and its chunks' text."""

from __future__ import annotations

import json

from cache_store.archive import ArchivedDocument, as_json, bad
from cache_store.catalog import ChunkInfo, ChunkText, DocumentInfo
from cache_store.keys import chunk_id

_MAX_NUMBER = 2**53


def encode_document(info: DocumentInfo, chunks: list[ChunkInfo]) -> bytes:
    """The member's bytes."""
    return as_json(
        {
            "source": info.source,
            "digest": info.digest,
            "settings": info.settings,
            "chunks": [[c.chunk_id, c.start, c.end, c.tokens, c.text] for c in chunks],
        }
    )


def decode_document(data: bytes, promised: ArchivedDocument) -> list[ChunkText]:
    """Its chunks, each with the text its id is the hash of. Raises IntegrityError where the
    document is not the one the manifest promised."""
    name = promised.member
    try:
        row = json.loads(data)
        found = ArchivedDocument(row["source"], row["digest"], row["settings"])
        chunks = [_chunk(*item) for item in row["chunks"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise bad(name, "it can't be understood") from error
    if found != promised:
        raise bad(name, "it is another document than the manifest says")
    return chunks


def _chunk(name: object, start: object, end: object, tokens: object, text: object) -> ChunkText:
    if not isinstance(text, str) or chunk_id(text) != name:
        raise ValueError("a text that isn't its id's")
    numbers = [n for n in (start, end, tokens) if type(n) is int and 0 <= n < _MAX_NUMBER]
    if len(numbers) != 3:
        raise ValueError("an impossible place")
    return ChunkText(chunk_id(text), text, numbers[0], numbers[1], numbers[2])
