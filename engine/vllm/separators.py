"""Finding a separator's text in token ids, however it was encoded.

A prompt that is encoded as one text has the separator in other ids than the separator alone: its
blanks merge with the words around it. So it is looked for in two ways. Where the separator's own
ids stand, as in prompts that were put together from parts, they are it. Elsewhere the ids are
spelt, and its text is found in what they spell; a token that holds only a blank of the separator
and else a neighbour's text is the neighbour's, so that no chunk loses a token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from engine.tokenizer import Tokenizer

_NEAR = 2  # tokens that are spelt beyond the longest possible separator


class Separator:
    """One separator for one tokenizer. Not thread-safe: it remembers what tokens spell.

    At the start of a prompt and at its end, beside a line break and beside a control token its
    outer blanks may be missing: texts get stripped on their way.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.text, self._tokenizer = text, tokenizer
        spelt = text.encode("utf-8", "replace")
        bare = spelt.strip()
        self._core = bare or spelt
        at = spelt.index(self._core)
        self._before, self._after = spelt[:at], spelt[at + len(self._core) :]
        # Wherever it stands there is a token with this byte; few others should have it.
        self._byte = next((b for b in self._core if not chr(b).isalnum()), self._core[0])
        self._reach = len(spelt) + _NEAR  # a token holds a byte of it at least
        self._holds: dict[int, bool] = {}
        self._blank: dict[int, bool] = {}
        self.ids = tuple(tokenizer.encode(text))
        alone = b"".join(tokenizer.pieces(self.ids, whole=True))
        same = b"".join(alone.split()) == b"".join(spelt.split()) if bare else spelt in alone
        if not same:
            self.ids = ()  # some of it can't be spelt: what is left may stand anywhere
        self._anchor = next((n for n, token in enumerate(self.ids) if self._may_hold(token)), 0)
        if self.ids:
            self._holds[self.ids[self._anchor]] = True

    def places(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Where it stands: `[start, end)` in tokens, rising and apart. One whose blanks all belong
        to neighbours' tokens is empty."""
        holds = self._holds
        near: list[int] = []
        for index, token in enumerate(token_ids):
            known = holds.get(token)
            if known is None:
                known = holds[token] = self._may_hold(token)
            if known:
                near.append(index)
        if not near:
            return []
        places = self._exact(token_ids, near)
        begin = 0
        for start, end in [*places, (len(token_ids), 0)]:
            for window in self._windows(near, begin, start):
                places += self._spelt(token_ids, *window)
            begin = end
        return sorted(places)

    def is_blank(self, token_ids: Sequence[int]) -> bool:
        """Whether ids spell nothing but blanks."""
        for token in token_ids:
            known = self._blank.get(token)
            if known is None:
                known = self._blank[token] = not self._piece(token).strip()
            if not known:
                return False
        return True

    def _piece(self, token: int) -> bytes:
        return self._tokenizer.pieces([token], whole=True)[0]

    def _may_hold(self, token: int) -> bool:
        return self._byte in self._piece(token)

    def _exact(self, token_ids: Sequence[int], near: Sequence[int]) -> list[tuple[int, int]]:
        """Where the very ids stand that the separator has alone."""
        if not self.ids:
            return []
        size, places, free = len(self.ids), list[tuple[int, int]](), 0
        for index in near:
            start = index - self._anchor
            if start >= free and tuple(token_ids[start : start + size]) == self.ids:
                free = start + size
                places.append((start, free))
        return places

    def _windows(self, near: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
        """Stretches of [begin, end) in which it may be, apart from each other."""
        found: list[tuple[int, int]] = []
        for index in near[bisect_left(near, begin) : bisect_left(near, end)]:
            first, last = max(begin, index - self._reach), min(end, index + self._reach + 1)
            if found and first <= found[-1][1]:
                first = found.pop()[0]
            found.append((first, last))
        return found

    def _spelt(self, token_ids: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
        """Where in the tokens [first, last) its text is found."""
        known = max(0, first - 1)  # what a token spells may depend on the one before
        ids = token_ids[known:last]
        pieces = self._tokenizer.pieces(ids, whole=True)[first - known :]
        bounds = [0, *accumulate(map(len, pieces))]
        text = b"".join(pieces)
        special = self._tokenizer.special_ids
        control = {bounds[n] for n, token in enumerate(token_ids[first:last]) if token in special}
        ends = {bounds[n + 1] for n in range(len(pieces)) if bounds[n] in control}
        if first == 0:
            ends.add(0)
        if last == len(token_ids):
            control = control | {len(text)}
        found: list[tuple[int, int]] = []
        free = 0
        at = text.find(self._core)
        while at >= 0:
            stop = at + len(self._core)
            begin, end = at - len(self._before), stop + len(self._after)
            if begin < free or text[begin:at] != self._before:
                bare = at in ends or (at > free and text[at - 1 : at] == b"\n")
                begin = at if bare and at >= free else -1
            if text[stop:end] != self._after:
                bare = stop in control or text[stop : stop + 1] == b"\n"
                end = stop if bare else -1
            if begin >= 0 and end >= 0 and not _cuts(begin, end, bounds, control):
                found.append(_tokens(text, bounds, begin, end))
                free = end
                at = text.find(self._core, end)
            else:
                at = text.find(self._core, at + 1)
        return [(first + a, first + b) for a, b in found]


def _meeting(bounds: Sequence[int], begin: int, end: int) -> range:
    """The tokens that have some of [begin, end), few as they are; bounds: where each begins, and
    where the last one ends."""
    return range(max(0, bisect_right(bounds, begin) - 1), bisect_left(bounds, end))


def _cuts(begin: int, end: int, bounds: Sequence[int], control: set[int]) -> bool:
    """Whether [begin, end) has a part, but not all, of a control token in it."""
    return any(
        bounds[n] in control and (bounds[n] < begin or bounds[n + 1] > end)
        for n in _meeting(bounds, begin, end)
    )


def _tokens(text: bytes, bounds: Sequence[int], begin: int, end: int) -> tuple[int, int]:
    """The tokens that are the separator's where its text is `text[begin:end]`.

    One that is partly beyond it is its own only where it holds more of it than blanks, or reaches
    out on both sides.
    """
    own: list[int] = []
    for index in _meeting(bounds, begin, end):
        start, stop = bounds[index], bounds[index + 1]
        inside = text[max(start, begin) : min(stop, end)]
        within = start >= begin and stop <= end
        if within or (start < begin and stop > end) or inside.strip():
            own.append(index)
    ahead = bisect_left(bounds, begin)  # tokens that begin before it
    return (own[0], own[-1] + 1) if own else (ahead, ahead)
