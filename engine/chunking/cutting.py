"""Documents to chunks: cut where their structure allows it, each chunk as full as it may be.

Every cut is chosen from the text around it alone, going forward: a change at a document's end
leaves the chunks before it as they were, and their stored KV good. A chunk's token ids are those
of its text encoded alone, and never more than the limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cache_store.errors import UsageError
from engine.chunking.chunk import Chunk
from engine.chunking.graphemes import is_boundary
from engine.chunking.layout import Layout
from engine.chunking.layouts import layout_of
from engine.chunking.placing import Places
from engine.chunking.token_starts import TokenStarts, Window
from engine.documents.document import Mark
from engine.tokenizer import Tokenizer, replace_surrogates

MIN_CHUNK_TOKENS = 16

_NOT_SPACE = re.compile(r"\S")
_CHARS_PER_TOKEN = 4.0
_HEADING_SHARE = 4  # headings in front take at most one part in so many of a chunk's tokens
_TABLE_SHARE = 2  # and a table's header


def cut_document(
    text: str,
    tokenizer: Tokenizer,
    chunk_tokens: int = 512,
    overlap: int = 0,
    *,
    form: str = "text",
    marks: Sequence[Mark] = (),
    headings: bool = False,
) -> Iterator[Chunk]:
    """Cut `text` into chunks of at most `chunk_tokens` ids, one after another.

    form, marks: as in `Document`. headings: whether the headings that a chunk stands under are
    put in front of its text.

    The chunks' runs `text[start:end]` joined are `text`, and without headings, outside tables, a
    run is its chunk's text. With overlap each chunk begins up to `overlap` ids before the end of
    the one before, at a sentence's start where there is one. What a reader sees as one character
    is cut only if it alone exceeds the limit, and one code point is never cut. No chunk is blank
    unless a run of white space fills it alone or with one character more. Blank text, and text
    the tokenizer has no ids for, gives no chunks.

    Raises UsageError, at once, for a limit under 16 or an overlap that is negative or not under
    the limit.
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
    if not text or text.isspace():
        return iter(())
    layout = layout_of(form, text)
    cutter = _Cutter(text, tokenizer, chunk_tokens, layout, Places(text, marks, form), headings)
    return _chunks(text, cutter, chunk_tokens, overlap)


def _chunks(text: str, cutter: _Cutter, limit: int, overlap: int) -> Iterator[Chunk]:
    held: Chunk | None = None  # the last one; what has no ids goes with it
    any_ids = False
    start = done = 0
    while done < len(text):
        chunk = cutter.next_chunk(start, done)
        if not chunk.token_ids and held:  # no chunk of its own for what has no ids
            wider = cutter.chunk(held.start, chunk.end)
            if len(wider.token_ids) <= limit:
                held, chunk = None, wider
        if held:
            yield cutter.placed(held)
        held = chunk
        any_ids = any_ids or bool(chunk.token_ids)
        done = chunk.end
        start = cutter.overlap_start(chunk, overlap) if overlap else done
    if held and any_ids:
        yield cutter.placed(held)


class _Cutter:
    """Takes one chunk after another off a text."""

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        limit: int,
        layout: Layout,
        places: Places,
        headings: bool,
    ) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._limit = limit
        self._layout = layout
        self._places = places
        self._with_headings = headings
        self._content_end = len(text.rstrip())
        self._chars_per_token = _CHARS_PER_TOKEN
        self._tokens = TokenStarts.of(tokenizer)
        self._window = Window(text, self._tokens)
        self._long_head = ""  # of a table, found to be too long; of 100,000 columns once is enough

    def chunk(self, start: int, end: int, lead: str = "") -> Chunk:
        body = self._text[start:end]
        ids = self._window.ids_to_end(start) if end == len(self._text) and not lead else None
        text = lead + body
        return Chunk(text, tuple(self._tokenizer.encode(text) if ids is None else ids), start, end)

    def placed(self, chunk: Chunk) -> Chunk:
        """With its place and headings."""
        headings, _ = self._layout.headings(chunk.start)
        place = self._places.place(chunk.start, chunk.end)
        if not headings and place is None:
            return chunk
        return Chunk(chunk.text, chunk.token_ids, chunk.start, chunk.end, place, headings)

    def next_chunk(self, start: int, done: int) -> Chunk:
        """The chunk from `start` that ends after `done`, the end of the chunk before.

        It starts at `done` after all where nothing new would fit behind the overlap.
        """
        lead, lead_tokens = self._lead(start)
        limit = self._limit - lead_tokens
        starts, whole = self._window.starts(start, limit, self._chars_per_token)
        room = wanted = limit
        small = self._limit // 10
        if whole and limit < len(starts) < limit + small:
            wanted = len(starts) // 2 + small  # two like chunks, not one and a scrap
        while True:
            end = self._cut(start, done, starts, whole, (min(wanted, room), room))
            if end is None:
                return self.next_chunk(done, done)
            chunk = self.chunk(start, end, lead)
            excess = len(chunk.token_ids) - self._limit
            if excess > 0 and end == start + 1 and lead:
                chunk = self.chunk(start, end)
                break
            if excess <= 0 or end == start + 1:
                break
            room = max(0, room - excess)  # alone, the text's ends are encoded otherwise
        ids = max(1, len(chunk.token_ids) - lead_tokens)
        self._chars_per_token = (chunk.end - chunk.start) / ids
        return chunk

    def overlap_start(self, chunk: Chunk, overlap: int) -> int:
        """Where the next chunk starts: at most `overlap` ids before `chunk` ends."""
        body = self._text[chunk.start : chunk.end]
        _, starts = self._tokens.ids(body)
        if not starts:
            return chunk.end
        kept = [chunk.start + place for place in starts[-overlap:]]
        earliest = max(chunk.start + 1, kept[0])
        for place in (*self._layout.overlap_places(earliest, chunk.end), *kept):
            if not earliest <= place < chunk.end:
                continue
            if not is_boundary(self._text, place, chunk.start):
                continue
            if len(self._tokenizer.encode(self._text[place : chunk.end])) <= overlap:
                return place
        return chunk.end

    def _lead(self, start: int) -> tuple[str, int]:
        """What is repeated in front of a chunk from `start`, and its tokens."""
        lead = ""
        if self._with_headings:
            found, before = self._layout.headings(start)
            path = found[:before]
            while path:
                lead = " › ".join(path) + "\n\n"
                if len(self._tokenizer.encode(lead)) <= self._limit // _HEADING_SHARE:
                    break
                path, lead = path[1:], ""
        head = self._layout.table_head(start)
        if head and head != self._long_head:
            if len(self._tokenizer.encode(head)) <= self._limit // _TABLE_SHARE:
                lead += head
            else:
                self._long_head = head
        return lead, len(self._tokenizer.encode(lead)) if lead else 0

    def _fits(self, start: int, end: int) -> bool:
        """Whether a chunk could be `[start, end)`."""
        lead, _ = self._lead(start)
        size = int(self._limit * self._chars_per_token * 1.25) + 64
        while start + size < end:  # far too long is told without encoding all of it
            size *= 2
            if size > end - start:
                break
            if len(self._tokenizer.encode(self._text[start : start + size])) > self._limit + 16:
                return False
        return len(self._tokenizer.encode(lead + self._text[start:end])) <= self._limit

    def _cut(
        self, start: int, done: int, starts: Sequence[int], whole: bool, rooms: tuple[int, int]
    ) -> int | None:
        """The end of the chunk from `start` so that about so many ids fit: the first of `rooms`,
        else the second. None if that is not beyond `done` and starting at `done` could be."""
        if whole and rooms[0] >= len(starts):
            return len(self._text)
        highs = [starts[room] for room in rooms if room < len(starts)]
        highs = [high for high in highs if high > done]
        if not highs:
            return done + 1 if start == done else None
        # Something other than white space belongs into this chunk and into the last one.
        after_first = max(starts[0] + 1, starts[1] if len(starts) > 1 else 0)
        low = max(starts[rooms[0] // 2], after_first, done + 1)
        last = self._content_end - 1
        if last > done:
            highs = [min(high, last) for high in highs] + highs
        first = _NOT_SPACE.search(self._text, start, highs[-1])
        if first:
            low = max(low, first.end())
            highs = [high for high in highs if high >= first.end()]
        after = max(done, first.end() if first else 0)
        ranges = []
        for high in highs:
            bound = self._layout.bound(start, after, high, self._fits)
            ranges.append((min(low, bound), bound))
            place = self._layout.between_blocks(start, done, *ranges[-1])
            if place is not None:
                return place
        for lowest, bound in ranges:
            place = self._layout.best_place(start, done, lowest, bound, self._fits)
            if place is not None:
                return place
        return highs[-1]
