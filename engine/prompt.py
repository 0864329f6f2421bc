"""A prompt as segments: prefix, chunks with separators between them, suffix."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from cache_store.errors import UsageError

SegmentKind = Literal["prefix", "chunk", "separator", "suffix"]


@dataclass(frozen=True)
class PromptChunk:
    """A chunk as a prompt uses it: its ids (encoded alone), its name and where it came from."""

    token_ids: tuple[int, ...]
    chunk_id: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Segment:
    """A run of tokens with its place [start, end) in the prompt."""

    kind: SegmentKind
    token_ids: tuple[int, ...]
    start: int
    chunk_id: str | None = None
    source: str | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Prompt:
    """Segments in order, without gaps, ending in a suffix of at least one token."""

    segments: tuple[Segment, ...]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        first = self.segments[0]
        return first.token_ids if first.kind == "prefix" else ()

    def before(self, segment: Segment) -> tuple[int, ...]:
        """The segment's actual context: every token in front of it."""
        return self.token_ids[: segment.start]


def lay_out(
    prefix: Sequence[int],
    chunks: Sequence[PromptChunk],
    separator: Sequence[int],
    suffix: Sequence[int],
) -> Prompt:
    """Joins separately encoded ids; nothing is ever tokenized again.

    Empty parts leave no segment. Raises UsageError for an empty suffix: the first output token
    comes from its last one, which is always computed.
    """
    if not suffix:
        raise UsageError("the prompt ends without a question", "give a question")
    segments: list[Segment] = []
    position = 0

    def add(
        kind: SegmentKind, ids: Sequence[int], name: str | None = None, source: str | None = None
    ) -> None:
        nonlocal position
        if ids:
            segments.append(Segment(kind, tuple(ids), position, name, source))
            position += len(ids)

    add("prefix", prefix)
    for index, chunk in enumerate(chunk for chunk in chunks if chunk.token_ids):
        if index:
            add("separator", separator)
        add("chunk", chunk.token_ids, chunk.chunk_id, chunk.source)
    add("suffix", suffix)
    return Prompt(tuple(segments))
