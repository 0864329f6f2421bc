"""The standard prompt of the measurements, and the store it is answered from."""

import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from cache_store.entry import predicted_file_bytes
from cache_store.errors import CacheblendError, UsageError
from cache_store.store import ChunkStore
from engine.base import BaseEngine
from engine.blueprint import Blueprint
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.tokenizer import Tokenizer

E = TypeVar("E", bound=BaseEngine)

PREFIX, CHUNKS, SUFFIX = 32, 8, 24
STORE_OVERHEAD = 64 * 2**20  # of databases, headers and the room a store keeps free


def standard_length(tokens: int, context: int) -> int:
    """Tokens of the standard prompt that fits into `tokens`: its chunks are all of one size.

    Raises UsageError where chunks would be empty, or the prompt too long for the model's context.
    """
    size = (tokens - PREFIX - SUFFIX) // CHUNKS
    if size < 1:
        raise UsageError(
            f"a prompt of {tokens} tokens is too short to measure",
            f"it has a prefix of {PREFIX}, {CHUNKS} chunks and a suffix of {SUFFIX} tokens",
        )
    length = PREFIX + CHUNKS * size + SUFFIX
    if length >= context:
        raise UsageError(
            f"a prompt of {length} tokens leaves no room in the model's context of {context}",
            f"measure fewer than {context} tokens",
        )
    return length


def standard_prompt(token_ids: Sequence[int]) -> Prompt:
    """Prefix, 8 equal chunks and suffix; the chunks stand in the opposite order of the text."""
    end = len(token_ids) - SUFFIX
    size = (end - PREFIX) // CHUNKS
    chunks = [
        PromptChunk(tuple(token_ids[start : start + size]))
        for start in range(PREFIX, PREFIX + CHUNKS * size, size)
    ]
    return lay_out(token_ids[:PREFIX], chunks[::-1], (), token_ids[end:])


def text_ids(tokenizer: Tokenizer, count: int, text: str | None = None) -> list[int]:
    """`count` token ids of `text`, repeated to that length.

    Without a text, pseudo-text, the same in every run: ids drawn as words are in a language,
    frequent ones (those a tokenizer learnt first, with low ids) often and the others seldom.
    Raises UsageError for a text without tokens.
    """
    if text is None:
        draw = random.Random(0)
        ids: list[int] = []
        while len(ids) < count:
            token = int(tokenizer.vocab_size ** draw.random())
            if token not in tokenizer.special_ids:
                ids.append(token)
        return ids
    ids = tokenizer.encode(text)
    if not ids:
        raise UsageError("the text to measure with is empty", "give a file that has text in it")
    return (ids * (1 + count // len(ids)))[:count]


@contextmanager
def temporary_store(blueprint: Blueprint, tokens: int) -> Iterator[ChunkStore]:
    """A store in the system's folder for temporary files with room for so many tokens of KV,
    gone afterwards. Raises CacheblendError where the disk lacks the room."""
    folder = Path(tempfile.gettempdir())
    limit = 2 * predicted_file_bytes(blueprint.shape, tokens) + STORE_OVERHEAD
    free = shutil.disk_usage(folder).free
    if limit > free:
        raise CacheblendError(
            f"measuring takes {limit:,} bytes in {folder}, and {free:,} are free",
            "set TMPDIR to a folder on a disk with more room, or measure fewer tokens",
        )
    with (
        tempfile.TemporaryDirectory(prefix="cacheblend-bench-", dir=folder) as name,
        ChunkStore.open(Path(name) / "store", limit_bytes=limit) as store,
    ):
        yield store


@contextmanager
def stored(engine: E, prompt: Prompt) -> Iterator[E]:
    """The engine over a temporary store that holds the prompt's prefix and chunks, each computed
    alone behind the prefix."""
    with temporary_store(engine.blueprint, len(prompt.token_ids)) as store:
        over = engine.over(store)
        chunks = [segment for segment in prompt.segments if segment.kind == "chunk"]
        over.writer(prompt.prefix_ids).write_missing(chunks[::-1])
        yield over
