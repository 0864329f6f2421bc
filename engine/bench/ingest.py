"""Ingest: how many tokens a second are computed and stored, against full prefill's rate."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from cache_store.errors import UsageError
from engine.api import Engine
from engine.bench.layout import PREFIX, temporary_store, text_ids
from engine.bench.measure import in_turn, paired, telling
from engine.options import BlendOptions
from engine.prompt import PromptChunk, lay_out


@dataclass(frozen=True)
class IngestRow:
    """seconds: of the rounds, for computing and storing all chunks; prefill_seconds: for a full
    prefill of each of them; share: ingest's rate over full prefill's, paired round by round."""

    chunk_tokens: int
    chunks: int
    seconds: tuple[float, ...]
    prefill_seconds: tuple[float, ...]
    tokens_per_s: float
    prefill_tokens_per_s: float
    share: float
    bytes_written: int


def check_lengths(lengths: Sequence[int], context: int) -> None:
    """Raises UsageError for chunks the model has no room for."""
    for length in lengths:
        if not 1 <= length < context - PREFIX:
            raise UsageError(
                f"chunks of {length} tokens do not fit the model's context of {context}",
                f"measure chunks of 1 to {context - PREFIX - 1} tokens",
            )


def measure_ingest(
    engine: Engine,
    lengths: Sequence[int],
    tokens: int,
    pairs: int,
    text: str | None,
    on_round: Callable[[str], None],
) -> list[IngestRow]:
    """Chunks of each length, about `tokens` of them together, behind a prefix that is there
    already. Raises UsageError for chunks the model has no room for."""
    check_lengths(lengths, engine.model.config.context)
    rows = []
    for length in lengths:
        count = max(1, tokens // length)
        ids = text_ids(engine.tokenizer, PREFIX + count * length, text)
        prefix, body = ids[:PREFIX], ids[PREFIX:]
        chunks = [
            PromptChunk(tuple(body[start : start + length]))
            for start in range(0, count * length, length)
        ]
        written: list[int] = []
        taken = in_turn(
            {
                "ingest": partial(_ingest, engine, prefix, chunks, written),
                "prefill": partial(_prefill, engine, chunks),
            },
            pairs,
            telling(on_round, f"chunks of {length}", pairs),
        )
        ingest, prefill = taken["ingest"], taken["prefill"]
        rows.append(
            IngestRow(
                length,
                count,
                tuple(ingest),
                tuple(prefill),
                count * length / median(ingest),
                count * length / median(prefill),
                paired(prefill, ingest).median,
                written[-1],
            )
        )
    return rows


def _ingest(
    engine: Engine, prefix: Sequence[int], chunks: Sequence[PromptChunk], written: list[int]
) -> float:
    """Into a new store every time: nothing is there already."""
    total = len(prefix) + sum(len(chunk.token_ids) for chunk in chunks)
    with temporary_store(engine.blueprint, total) as store:
        writer = Engine(engine.model, engine.blueprint, store=store).writer(prefix)
        writer.write_prefix()
        began = time.perf_counter()
        writer.write_missing(chunks)
        seconds = time.perf_counter() - began
        written.append(sum(entry.nbytes for entry in store.entries()))
    return seconds


def _prefill(engine: Engine, chunks: Sequence[PromptChunk]) -> float:
    options = BlendOptions.of(mode="full")
    prompts = [lay_out((), (), (), chunk.token_ids) for chunk in chunks]
    began = time.perf_counter()
    for prompt in prompts:
        engine.prefill(prompt, options)
    return time.perf_counter() - began
