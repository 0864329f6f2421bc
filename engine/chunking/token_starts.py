"""Where in a text its tokens begin, told from the ids alone: several times faster than asking the
library for offsets."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np

from engine.tokenizer import Tokenizer

MARGIN = 16  # ids at a piece's end that may be other than in the whole text


class TokenStarts:
    """Ids of texts, and the character each begins at. Pieces of ids are kept: share one a
    tokenizer, with `of`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, bytes] = {}

    @staticmethod
    @lru_cache(maxsize=4)
    def of(tokenizer: Tokenizer) -> TokenStarts:
        return TokenStarts(tokenizer)

    def ids(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of `text` encoded alone, and for each the character it begins at, or is part of."""
        ids = self._tokenizer.encode(text)
        starts = self._told(text, ids)
        if starts is None:  # a normalizer changed the text, or characters have no ids
            spans = self._tokenizer.encode_with_offsets(text)
            return [token for token, _, _ in spans], [start for _, start, _ in spans]
        return ids, starts

    def _told(self, text: str, ids: list[int]) -> list[int] | None:
        """The starts, where the ids' pieces together are the text."""
        known = self._pieces
        for token in set(ids).difference(known):
            (known[token],) = self._tokenizer.pieces([token], whole=True)
        pieces = [known[token] for token in ids]
        raw, joined = text.encode(), b"".join(pieces)
        shift = len(joined) - len(raw)
        if shift not in (0, 1) or not joined.endswith(raw) or (shift and joined[:1] != b" "):
            return None
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        begins = np.maximum(0, np.concatenate([[0], ends[:-1]]) - shift) if ids else ends
        if len(raw) != len(text):
            leads = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
            begins = np.cumsum(leads)[np.minimum(begins, len(raw) - 1)] - 1
        return list(map(int, begins.tolist()))


class Window:
    """The tokens of a text from some place on, encoded piece by piece while the place moves on.

    Near enough to those of a run that is encoded alone to choose where to cut it; what is cut is
    then encoded alone, and counted.
    """

    def __init__(self, text: str, starts: TokenStarts) -> None:
        self._text = text
        self._tokens = starts
        self._starts: list[int] = []  # of known tokens, in the text
        self._first = 0  # the first of them that still matters
        self._end = 0  # where what is known ends
        self._whole: tuple[int, list[int]] | None = None  # of the last piece, if it was all

    def ids_to_end(self, start: int) -> list[int] | None:
        """Ids of all the text from `start` on, where they happen to be known."""
        return self._whole[1] if self._whole and self._whole[0] == start else None

    def starts(self, start: int, count: int, chars_per_token: float) -> tuple[list[int], bool]:
        """Where the tokens from `start` on begin, more than `count` of them unless the text ends
        before; and whether they reach its end."""
        self._move(start)
        least = 0
        while self._end < len(self._text) and len(self._starts) - self._first < count + MARGIN:
            lacking = count + MARGIN - (len(self._starts) - self._first)
            begin = start
            if len(self._starts) - self._first > MARGIN:  # what ended there may go on
                begin = self._starts[-MARGIN]
                del self._starts[-MARGIN:]
                lacking += MARGIN
            else:
                del self._starts[self._first :]
            size = max(int(lacking * chars_per_token * 1.25) + 64, least)
            end = min(begin + size, len(self._text))
            least = 2 * (end - start)
            ids, starts = self._tokens.ids(self._text[begin:end])
            self._whole = (begin, ids) if end == len(self._text) else None
            self._starts += [begin + place for place in starts]
            self._end = end
        return self._starts[self._first :], self._end == len(self._text)

    def _move(self, start: int) -> None:
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start < self._end:
            self._first = place
        elif start != self._end or place < len(self._starts):
            self._starts, self._first, self._end = [], 0, start
        else:
            self._first = place
        if self._first > 4096:
            del self._starts[: self._first]
            self._first = 0
