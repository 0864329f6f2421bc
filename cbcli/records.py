"""Chunks, documents, models and entries as `--json` has them: the same fields in every command.

`docs/reference/schemas/records.json` describes each of them. Sizes are in bytes, times in seconds
since the epoch, places in characters.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cache_store.catalog import ChunkInfo, DocumentInfo, Place
from cache_store.results import EntryInfo
from engine.context import kind_behind

if TYPE_CHECKING:
    from engine.chunking import Chunk


def place_record(place: Place | None) -> dict[str, Any] | None:
    """Where in its file something stands: `unit` pages, rows and the like, `first` to `last`."""
    return None if place is None else asdict(place)


def position_record(chunk: ChunkInfo) -> dict[str, Any]:
    """Where a chunk is from; start and end in characters of the document's text."""
    return {
        "source": chunk.source,
        "ordinal": chunk.ordinal,
        "start": chunk.start,
        "end": chunk.end,
        "place": place_record(chunk.place),
        "headings": list(chunk.headings),
    }


def chunk_record(chunk: ChunkInfo) -> dict[str, Any]:
    """A chunk, and where it is from."""
    return {
        "chunk_id": chunk.chunk_id,
        **position_record(chunk),
        "tokens": chunk.tokens,
        "text": chunk.text,
    }


def cut_record(chunk: Chunk, source: str, ordinal: int) -> dict[str, Any]:
    """A chunk that was cut and isn't in a store; ordinal: its number in the document, from 0 on."""
    return chunk_record(
        ChunkInfo(
            chunk.chunk_id,
            chunk.text,
            len(chunk.token_ids),
            source,
            ordinal,
            chunk.start,
            chunk.end,
            chunk.place,
            chunk.headings,
        )
    )


def document_record(info: DocumentInfo, collections: Sequence[str] = ()) -> dict[str, Any]:
    """A document of the store, how it was cut as an object; collections: those it is in."""
    described = asdict(info)
    with contextlib.suppress(ValueError):
        described["settings"] = json.loads(info.settings)
    if info.size < 0:  # of no file
        described |= {"size": None, "mtime_ns": None}
    return {**described, "collections": list(collections)}


def model_record(name: str | None, fingerprint: str) -> dict[str, Any]:
    """A model that something was stored with; name: as it was then, None where nobody knows."""
    return {"name": name, "fingerprint": fingerprint}


def entry_record(entry: EntryInfo, model: str | None, usable: str | None) -> dict[str, Any]:
    """A stored entry of KV. model: its name; usable: what the present settings can do with it,
    None where that isn't known."""
    return {
        "key": entry.key,
        "model": model_record(model, entry.spec.model),
        "dtype": entry.spec.dtype,
        "tokens": entry.tokens,
        "context": kind_behind(entry.context_tokens),
        "context_tokens": entry.context_tokens,
        "regime": entry.regime,
        "bytes": entry.nbytes,
        "saved": entry.saved,
        "hits": entry.hits,
        "stored_at": entry.stored_at,
        "used_at": entry.used_at,
        "usable": usable,
    }
