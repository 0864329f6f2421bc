"""docs/format.md is true: files are read here by its figures alone, with none of our readers."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import struct
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
from blake3 import blake3
from xxhash import xxh3_128

from cache_store.catalog import ChunkText
from cache_store.exporting import export_to, plan_export
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cache_store.support import SPEC, file_of, make_layers, put

NOTES = Path(__file__).parents[2] / "docs/format.md"
IDS, CONTEXT, TEXT = (5, 70000, 9), (1, 2), "Words of a chunk."


def figures() -> dict[str, int]:
    """Offsets of the header's fields, from the table of the notes."""
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", NOTES.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 12
    return {what.split(":")[0].split(",")[0].strip("` "): int(offset) for offset, what in rows}


@pytest.fixture
def key(store: ChunkStore) -> str:
    store.catalog.name_model(SPEC.model, "tiny")
    chunks = [ChunkText(chunk_id(TEXT), TEXT, 3, 20, len(IDS))]
    store.catalog.replace_document("/a.md", "digest", '{"chunk_tokens":9}', chunks)
    return put(store, IDS, CONTEXT, regime="long", chunk_id=chunk_id(TEXT))


def u32(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", data, offset)[0])


def hashed(*parts: bytes) -> str:
    return blake3(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).hexdigest()


def test_a_chunk_file_is_as_the_notes_say(store: ChunkStore, key: str) -> None:
    at, data = figures(), file_of(store, key).read_bytes()
    assert data[:8] == b"CBCHUNK\0"
    assert u32(data, at["format version"]) == 1
    length = u32(data, at["length H of the header"])
    assert length % 64 == 0
    checksum = at["xxh3_128 of the header's bytes 0 to 15 and 32 to H"]
    assert data[checksum : checksum + 16] == xxh3_128(data[:16] + data[32:length]).digest()
    layers = u32(data, at["layers L"])
    assert layers == SPEC.layers
    assert u32(data, at["KV heads"]) == SPEC.kv_heads
    assert u32(data, at["head size"]) == SPEC.head_dim
    assert u32(data, at["KV dtype"]) == 2  # fp32
    tokens, context = u32(data, at["tokens T"]), u32(data, at["context tokens C"])
    assert (tokens, context) == (len(IDS), len(CONTEXT))
    lengths = struct.unpack_from(
        "<4I", data, at["lengths in bytes of the four strings that follow"]
    )
    place = at["strings"]
    strings = []
    for size in lengths:
        strings.append(data[place : place + size].decode())
        place += size
    assert strings == [SPEC.model, SPEC.tokenizer, "long", chunk_id(TEXT)]
    assert struct.unpack_from(f"<{tokens + context}I", data, place) == IDS + CONTEXT
    place += 4 * (tokens + context)
    sums = [data[place + 16 * n : place + 16 * (n + 1)] for n in range(layers)]
    assert data[place + 16 * layers : length].strip(b"\0") == b""
    half = tokens * SPEC.kv_heads * SPEC.head_dim * 4
    assert len(data) == length + 2 * layers * half
    for number, (k, v) in enumerate(make_layers(SPEC, tokens)):
        start = length + 2 * half * number
        assert data[start : start + half] == k
        assert data[start + half : start + 2 * half] == v
        assert xxh3_128(k + v).digest() == sums[number]


def test_names_are_hashes_of_what_the_notes_say(store: ChunkStore, key: str) -> None:
    assert blake3(TEXT.encode()).hexdigest() == chunk_id(TEXT)
    numbers = struct.pack("<4I", 1, SPEC.layers, SPEC.kv_heads, SPEC.head_dim)
    group = hashed(
        b"cacheblend chunk",
        numbers,
        SPEC.dtype.encode(),
        SPEC.model.encode(),
        SPEC.tokenizer.encode(),
        struct.pack("<3I", *IDS),
    )
    assert hashed(b"cacheblend entry", group.encode(), struct.pack("<2I", *CONTEXT), b"long") == key


def test_index_and_catalog_are_as_the_notes_say(store: ChunkStore, key: str) -> None:
    index = sqlite3.connect(store.path / "kv/cache.db")
    rows = index.execute("SELECT key, raw, filename, mode, value, tag FROM Cache").fetchall()
    index.close()
    entry = next(row for row in rows if row[0] == key)
    group = next(row for row in rows if row[0] == entry[5])
    assert (entry[1], entry[3], entry[4]) == (1, 2, None)
    assert re.fullmatch(key + r"\.[0-9a-f]{8}\.kv", entry[2])
    assert (group[1], group[2], group[3], group[5]) == (1, None, 1, chunk_id(TEXT))
    listed = json.loads(group[4])
    assert listed == {
        "v": 1,
        "spec": asdict(SPEC),
        "tokens": len(IDS),
        "chunk": chunk_id(TEXT),
        "entries": [[key, "long", list(CONTEXT)]],
    }
    notes = NOTES.read_text("utf-8")
    catalog = sqlite3.connect(store.path / "catalog.db")
    ((version,),) = catalog.execute("PRAGMA user_version")
    assert f"`user_version` {version}:" in notes
    tables = [n for (n,) in catalog.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        (said,) = re.findall(rf"^\| `{table}` \| (.*) \|$", notes, re.MULTILINE)
        columns = {row[1] for row in catalog.execute(f"PRAGMA table_info({table})")}
        assert set(re.findall(r"`(\w+)`", said)) == columns - {"value"} | set(
            re.findall(r"`(value)`", said)
        )
    catalog.close()


def test_an_archive_is_as_the_notes_say(store: ChunkStore, key: str) -> None:
    sink = io.BytesIO()
    export_to(store, plan_export(store, None, None), sink, lambda done: None)
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as tar:
        held = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    names = list(held)
    document = f"documents/{blake3(b'/a.md').hexdigest()}.json"
    assert names == ["manifest.json", "manifest.blake3", f"chunks/{key}.kv", document]
    manifest = json.loads(held["manifest.json"])
    assert blake3(held["manifest.json"]).hexdigest().encode() == held["manifest.blake3"]
    chunk = held[f"chunks/{key}.kv"]
    assert chunk == file_of(store, key).read_bytes()
    assert manifest == {
        "format": "cacheblend archive",
        "version": 1,
        "models": {SPEC.model: "tiny"},
        "documents": [["/a.md", "digest", '{"chunk_tokens":9}']],
        "members": [
            [f"chunks/{key}.kv", len(chunk), chunk[16:32].hex()],
            [document, len(held[document]), blake3(held[document]).hexdigest()],
        ],
    }
    assert json.loads(held[document]) == {
        "source": "/a.md",
        "digest": "digest",
        "settings": '{"chunk_tokens":9}',
        "chunks": [[chunk_id(TEXT), 3, 20, len(IDS), TEXT]],
    }
