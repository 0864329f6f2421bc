"""A conversation in a file, to be gone on from: questions, answers and the texts of chunks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_store.catalog import ChunkInfo, Place
from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cbcli.records import chunk_record

if TYPE_CHECKING:
    from cbcli.chat.talk import Talk
    from engine.base import BaseEngine
    from engine.conversation import Turn

SCHEMA = 1
_KIND = "cacheblend chat"


@dataclass(frozen=True)
class Transcript:
    """What a file holds: turns, and the chunks that came with them."""

    turns: tuple[Turn, ...]
    chunks: tuple[ChunkInfo, ...]


def record(talk: Talk) -> dict[str, Any]:
    """A conversation as JSON: the turns that are still in it."""
    engine = talk.engine
    return {
        "schema": SCHEMA,
        "kind": _KIND,
        "model": {"name": engine.info.name, "fingerprint": engine.info.fingerprint},
        "tokenizer": engine.tokenizer.fingerprint,
        "turns": [
            {
                "question": turn.question,
                "answer": turn.answer,
                "answer_token_ids": list(turn.answer_ids),
                "cite": turn.cite,
                "chunks": [
                    {"number": c.number, **chunk_record(talk.chunk_of(c.chunk.token_ids))}
                    for c in turn.chunks
                ],
            }
            for turn in talk.conversation.turns
        ],
    }


def save(talk: Talk, path: Path) -> None:
    """Writes it, in place of an earlier one. Raises UsageError for another file, OSError."""
    if path.exists():
        _read(path)  # no file but a transcript is written over
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    text = json.dumps(record(talk), ensure_ascii=True, indent=1) + "\n"
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, engine: BaseEngine) -> Transcript:
    """Reads one. An answer of another tokenizer is encoded anew. Raises NotFoundError, UsageError
    for a file that is none."""
    from engine.conversation import NumberedChunk, Turn

    value = _read(path)
    same = value.get("tokenizer") == engine.tokenizer.fingerprint
    turns, chunks = [], []
    try:
        for raw in value["turns"]:
            infos = [_chunk(item) for item in raw["chunks"]]
            answer = _text(raw["answer"])
            ids = tuple(map(int, raw["answer_token_ids"]))
            size = engine.model.config.vocab
            if not same or not all(0 <= i < size for i in ids) or _steers(engine, ids):
                ids = tuple(engine.tokenizer.encode(answer))
            numbered = tuple(
                NumberedChunk(int(item["number"]), engine.chunk(info.text, info.source or None))
                for item, info in zip(raw["chunks"], infos, strict=True)
            )
            cite = raw["cite"] is True
            turns.append(Turn(_text(raw["question"]), numbered, cite, answer, ids))
            chunks += infos
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _none(path) from error
    numbers = [c.number for turn in turns for c in turn.chunks]
    if len(set(numbers)) != len(numbers) or any(number < 1 for number in numbers):
        raise _none(path)
    return Transcript(tuple(turns), tuple(chunks))


def _steers(engine: BaseEngine, ids: Sequence[int]) -> bool:
    """Whether control tokens are among them, which nothing that is read may bring in."""
    return not engine.tokenizer.special_ids.isdisjoint(ids)


def _chunk(item: dict[str, Any]) -> ChunkInfo:
    text = _text(item["text"])
    place = item["place"]
    return ChunkInfo(
        chunk_id(text),
        text,
        int(item["tokens"]),
        _text(item["source"]),
        int(item["ordinal"]),
        int(item["start"]),
        int(item["end"]),
        None
        if place is None
        else Place(_text(place["unit"]), int(place["first"]), int(place["last"])),
        tuple(map(_text, item["headings"])),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("text expected")
    return value


def _read(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise _none(path)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}", "/save writes one") from None
    except (ValueError, RecursionError):
        raise _none(path) from None
    if not isinstance(value, dict) or (value.get("kind"), value.get("schema")) != (_KIND, SCHEMA):
        raise _none(path)
    return value


def _none(path: Path) -> CacheblendError:
    return UsageError(f"{path} is no conversation that was saved by chat", "name another file")
