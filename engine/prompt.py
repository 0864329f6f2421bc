"""A prompt as segments: prefix, chunks with separators between them, suffix. In a conversation what
earlier turns said stands between them, as history."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Literal

from cache_store.errors import UsageError

SegmentKind = Literal["prefix", "chunk", "separator", "history", "suffix"]


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
    """Segments in order, without gaps, ending in a suffix of at least one token.

    kept: so many tokens, to the end of a segment, are in the KV cache already, from the turns of a
    conversation before this one.
    """

    segments: tuple[Segment, ...]
    kept: int = 0

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Those of the segments in front that are the prefix; two where a part of it is kept."""
        prefix = takewhile(lambda segment: segment.kind == "prefix", self.segments)
        return tuple(chain.from_iterable(segment.token_ids for segment in prefix))

    def before(self, segment: Segment) -> tuple[int, ...]:
        """The segment's actual context: every token in front of it."""
        return self.token_ids[: segment.start]


def lay_out(
    prefix: Sequence[int],
    chunks: Sequence[PromptChunk],
    separator: Sequence[int],
    suffix: Sequence[int],
    leads: Sequence[Sequence[int]] | None = None,
) -> Prompt:
    """Joins separately encoded ids; nothing is ever tokenized again.

    leads: what goes in front of each chunk, in place of the separator between two. Empty parts
    leave no segment. Raises UsageError for an empty suffix: the first output token comes from its
    last one, which is always computed.
    """
    if not suffix:
        raise UsageError("the prompt ends without a question", "give a question")
    line = SegmentLine()
    line.add("prefix", prefix)
    line.add_chunks(chunks, separator, leads)
    line.add("suffix", suffix)
    return Prompt(tuple(line.segments))


class SegmentLine:
    """Segments put one behind the other."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.length = 0

    def add(
        self,
        kind: SegmentKind,
        ids: Sequence[int],
        name: str | None = None,
        source: str | None = None,
    ) -> None:
        """A segment behind the others; none where there are no ids."""
        if ids:
            self.segments.append(Segment(kind, tuple(ids), self.length, name, source))
            self.length += len(ids)

    def add_chunks(
        self,
        chunks: Sequence[PromptChunk],
        separator: Sequence[int],
        leads: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Chunks, but those without a token, with separators between them or each behind its lead,
        see `lay_out`."""
        ahead = [None] * len(chunks) if leads is None else leads
        pairs = zip(ahead, chunks, strict=True)
        for index, (lead, chunk) in enumerate(pair for pair in pairs if pair[1].token_ids):
            if lead is not None:
                self.add("separator", lead)
            elif index:
                self.add("separator", separator)
            self.add("chunk", chunk.token_ids, chunk.chunk_id, chunk.source)
