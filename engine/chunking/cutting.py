"""Documents to chunks: cut at paragraphs, else sentences, lines, words, else between characters.

Every cut is chosen from the text around it alone, going forward: a change at a document's end
leaves the chunks before it as they were, and their stored KV good. A chunk's token ids are those
of its text encoded alone, and never more than the limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cache_store.errors import UsageError
from engine.chunking.chunk import Chunk
from engine.chunking.graphemes import is_boundary
from engine.tokenizer import Tokenizer, replace_surrogates

MIN_CHUNK_TOKENS = 16

_CLOSERS = "\"'”’»)\\]}）」』】》〉"
# A blank line; the next paragraph keeps its indentation.
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")
# The look-behinds keep these linear on long runs of dots or spaces.
_SENTENCE = re.compile(
    rf"(?<=[.!?…])[{_CLOSERS}]{{0,3}}\s+"
    rf"|(?<=[。！？｡．])[{_CLOSERS}]{{0,3}}(?![。！？｡．{_CLOSERS}])\s*"
)
_LINE = re.compile(r"[\n\r\x0b\x0c\x85\u2028\u2029]+")
_WORD = re.compile(r"\s+|(?<=[、，；：])")
_LEVELS = (_PARAGRAPH, _SENTENCE, _LINE, _WORD)
_NOT_SPACE = re.compile(r"\S")

_MARGIN = 16  # ids at a window's end that may be other than in the whole text
_CHARS_PER_TOKEN = 4.0


def split_document(
    text: str, tokenizer: Tokenizer, chunk_tokens: int = 512, overlap: int = 0
) -> list[Chunk]:
    """Cut `text` into chunks of at most `chunk_tokens` ids.

    Without overlap the chunks' texts joined are `text`. With it each chunk begins up to `overlap`
    ids before the end of the one before, at a sentence's start where there is one. What a reader
    sees as one character is cut only if it alone exceeds the limit, and one code point is never
    cut. No chunk is blank unless a run of white space fills it alone or with one
    character more. Blank text, and text the
    tokenizer has no ids for, gives no chunks.

    Raises UsageError for a limit under 16 or an overlap that is negative or not under the limit.
    """
    if chunk_tokens < MIN_CHUNK_TOKENS:
        raise UsageError(
            f"chunks of {chunk_tokens} tokens are too small", f"use {MIN_CHUNK_TOKENS} or more"
        )
    if not 0 <= overlap < chunk_tokens:
        raise UsageError(
            f"an overlap of {overlap} tokens does not fit chunks of {chunk_tokens}",
            f"use 0 to {chunk_tokens - 1}",
        )
    text = replace_surrogates(text)
    if not text.strip():
        return []
    cutter = _Cutter(text, tokenizer, chunk_tokens)
    chunks: list[Chunk] = []
    start = done = 0
    while done < len(text):
        chunk = cutter.next_chunk(start, done)
        if not chunk.token_ids and chunks:  # no chunk of its own for what has no ids
            wider = cutter.chunk(chunks[-1].start, chunk.end)
            if len(wider.token_ids) <= chunk_tokens:
                chunks.pop()
                chunk = wider
        chunks.append(chunk)
        done = chunk.end
        start = cutter.overlap_start(chunk, overlap) if overlap else done
    return chunks if any(chunk.token_ids for chunk in chunks) else []


class _Cutter:
    """Takes one chunk after another off a text."""

    def __init__(self, text: str, tokenizer: Tokenizer, limit: int) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._limit = limit
        self._content_end = len(text.rstrip())
        self._chars_per_token = _CHARS_PER_TOKEN

    def chunk(self, start: int, end: int) -> Chunk:
        text = self._text[start:end]
        return Chunk(text, tuple(self._tokenizer.encode(text)), start, end)

    def next_chunk(self, start: int, done: int) -> Chunk:
        """The chunk from `start` that ends after `done`, the end of the chunk before.

        It starts at `done` after all where nothing new would fit behind the overlap.
        """
        spans, whole = self._window(start)
        room = wanted = self._limit
        small = self._limit // 10
        if whole and self._limit < len(spans) < self._limit + small:
            wanted = len(spans) // 2 + small  # two like chunks, not one and a scrap
        while True:
            end = self._cut(start, done, spans, (min(wanted, room), room))
            if end is None:
                return self.next_chunk(done, done)
            chunk = self.chunk(start, end)
            excess = len(chunk.token_ids) - self._limit
            if excess <= 0 or end == start + 1:
                break
            room = max(0, room - excess)  # alone, the text's ends are encoded otherwise
        self._chars_per_token = len(chunk.text) / max(1, len(chunk.token_ids))
        return chunk

    def overlap_start(self, chunk: Chunk, overlap: int) -> int:
        """Where the next chunk starts: at most `overlap` ids before `chunk` ends."""
        spans = self._tokenizer.encode_with_offsets(chunk.text)
        kept = spans[-overlap:]
        earliest = max(chunk.start + 1, chunk.start + kept[0][1]) if kept else chunk.end
        starts = [place for _, place, _ in kept]
        for level in ((_PARAGRAPH, _SENTENCE, _LINE), (_WORD,), ()):
            places = self._places(level, earliest, chunk.end - 1)
            for place in places or ([] if level else [chunk.start + start for start in starts]):
                if place < earliest or not is_boundary(self._text, place, chunk.start):
                    continue
                if len(self._tokenizer.encode(self._text[place : chunk.end])) <= overlap:
                    return place
        return chunk.end

    def _window(self, start: int) -> tuple[list[tuple[int, int, int]], bool]:
        """Ids and offsets from `start` on, more than fit a chunk, and whether they reach the
        text's end."""
        size = int(self._limit * self._chars_per_token * 1.25) + 64
        while True:
            window = self._text[start : start + size]
            whole = start + size >= len(self._text)
            spans = self._tokenizer.encode_with_offsets(window)
            if whole or len(spans) >= self._limit + _MARGIN:
                return spans, whole
            size *= 2

    def _cut(
        self,
        start: int,
        done: int,
        spans: Sequence[tuple[int, int, int]],
        rooms: tuple[int, int],
    ) -> int | None:
        """The end of the chunk from `start` so that about so many ids fit: the first of `rooms`,
        else the second. None if that is not beyond `done` and starting at `done` could be."""
        if rooms[0] >= len(spans):
            return len(self._text)
        highs = [start + spans[room][1] for room in rooms if room < len(spans)]
        highs = [high for high in highs if high > done]
        if not highs:
            return done + 1 if start == done else None
        # Something other than white space belongs into this chunk and into the last one.
        low = max(start + spans[rooms[0] // 2][1], start + spans[0][2], done + 1)
        last = self._content_end - 1
        if last > done:
            highs = [min(high, last) for high in highs] + highs
        first = _NOT_SPACE.search(self._text, start, highs[-1])
        if first:
            low = max(low, first.end())
            highs = [high for high in highs if high >= first.end()]
        for high in highs:
            place = self._best_place(start, done, min(low, high), high)
            if place is not None:
                return place
        return highs[-1]

    def _best_place(self, start: int, done: int, low: int, high: int) -> int | None:
        """The last boundary of the best kind in `[low, high]`, else the last after `done`."""
        for level in _LEVELS:
            for place in reversed(self._places((level,), low, high)):
                if level is _PARAGRAPH and self._under_heading(place, start):
                    continue
                if is_boundary(self._text, place, start):
                    return place
        for place in range(high, done, -1):
            if is_boundary(self._text, place, start):
                return place
        return None

    def _under_heading(self, place: int, start: int) -> bool:
        """Whether the paragraph that ends at `place` is a Markdown heading, which belongs to
        what follows it."""
        end = start + len(self._text[start:place].rstrip())
        line = max(start, self._text.rfind("\n", start, end) + 1)
        return self._text.startswith("#", line)

    def _places(self, levels: Sequence[re.Pattern[str]], low: int, high: int) -> list[int]:
        """Ends of the levels' matches within `[low, high]`, ascending."""
        found = {
            match.end()
            for level in levels
            for match in level.finditer(self._text, max(0, low - _MARGIN), high)
        }
        return sorted(place for place in found if low <= place <= high)
