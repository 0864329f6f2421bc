"""The tokens of a prompt as cells of a terminal.

A *cell group* is the least that can be shown by itself: one character with the marks on it. A token
that is a part of a character shares the group with the tokens of its other parts. Every group has
the same width in every terminal: what has none (joiners, variation selectors), what drives a
terminal and what terminals draw in different widths is shown as something else, never obeyed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from rich.cells import get_character_cell_size

from cbcli.text import visible
from engine.trace.record import TokenTable

TEXT, SPACE, NEWLINE, SYMBOL = range(4)
NO_WIDTH = "·"  # instead of a character that takes no cell
NOTHING = "∅"  # a token without any byte
MARKS = 6  # most of them on one character
_RANGES_OF_SELECTORS = ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF), (0x1F3FB, 0x1F3FF))


@dataclass(frozen=True)
class Cells:
    """G groups in order. shown: what is printed of each; widths: its cells; first, last: the tokens
    it belongs to, both included; kinds: TEXT, SPACE, NEWLINE (the line ends behind it), SYMBOL."""

    shown: Sequence[str]
    widths: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]

    def of_token(self, token: int) -> tuple[int, int]:
        """The groups [start, end) of a token; every token has at least one."""
        start = int(np.searchsorted(self.last, token, side="left"))
        return start, int(np.searchsorted(self.first, token, side="right"))


def cells_of(tokens: TokenTable, cuts: Sequence[int], *, ascii: bool = False) -> Cells:
    """The cells of a prompt. cuts: token positions no group reaches over, such as segments' ends;
    ascii: other characters are spelt out."""
    parts: list[_Part] = []
    begin = 0
    for end in sorted({*(c for c in cuts if 0 < c < len(tokens.ids)), len(tokens.ids)}):
        parts.append(_part(tokens, begin, end, ascii))
        begin = end
    return Cells(
        [shown for part in parts for shown in part.shown],
        np.concatenate([part.widths for part in parts]).astype(np.int32),
        np.concatenate([part.first for part in parts]).astype(np.int32),
        np.concatenate([part.last for part in parts]).astype(np.int32),
        np.concatenate([part.kinds for part in parts]).astype(np.int8),
    )


@dataclass(frozen=True)
class _Part:
    shown: list[str]
    widths: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]


def _part(tokens: TokenTable, begin: int, end: int, ascii: bool) -> _Part:
    low, high = (int(tokens.ends[begin - 1]) if begin else 0), int(tokens.ends[end - 1])
    raw = tokens.text[low:high]
    ends = tokens.ends[begin:end].astype(np.int64) - low
    text = raw.decode("utf-8", "surrogateescape")
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1  # bytes that are no character
    stops = np.cumsum(sizes)
    groups, shown, kinds, widths = _groups(text, codes, ascii)
    starts = stops[groups] - sizes[groups]
    finish = np.append(starts[1:], len(raw))[: len(starts)] - 1  # the last byte of each group
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, finish, side="right")
    one, other = (begin + first).astype(np.int32), (begin + last).astype(np.int32)
    return _with_empty(_Part(shown, widths, one, other, kinds), tokens, begin, end, ascii)


def _groups(
    text: str, codes: npt.NDArray[np.uint32], ascii: bool
) -> tuple[npt.NDArray[np.int64], list[str], npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Where groups begin, in characters, and what is shown of them."""
    plain = (codes >= 0x20) & (codes < 0x7F)
    if plain.all():
        kinds = np.where(codes == 0x20, SPACE, TEXT).astype(np.int8)
        return np.arange(len(text)), list(text), kinds, np.ones(len(text), np.int32)
    unique, each = np.unique(codes, return_inverse=True)
    signs = [_shown(chr(code), ascii) for code in unique.tolist()]
    if all(columns for _, _, columns in signs):  # without marks every character is a group
        cells = np.array([cell for cell, _, _ in signs], dtype=object)
        kinds = np.array([kind for _, kind, _ in signs], dtype=np.int8)[each]
        sizes = np.array([columns for _, _, columns in signs], dtype=np.int32)[each]
        return np.arange(len(text)), cells[each].tolist(), kinds, sizes
    begins: list[int] = []
    shown: list[str] = []
    kinds_: list[int] = []
    widths: list[int] = []
    marks = 0
    for number, char in enumerate(text):
        cell, kind, columns = _shown(char, ascii)
        if columns == 0:  # a mark, which stands on the character before
            if begins and kinds_[-1] == TEXT and marks < MARKS:
                shown[-1] += cell
                marks += 1
                continue
            cell, columns = "◌" + cell, 1
        marks = 0
        begins.append(number)
        shown.append(cell)
        kinds_.append(kind)
        widths.append(columns)
    found = np.array(begins, dtype=np.int64)
    return found, shown, np.array(kinds_, np.int8), np.array(widths, np.int32)


def _with_empty(part: _Part, tokens: TokenTable, begin: int, end: int, ascii: bool) -> _Part:
    """With a group of its own for each token that no byte belongs to."""
    sizes = np.diff(tokens.ends[begin:end], prepend=tokens.ends[begin - 1] if begin else 0)
    missing = np.flatnonzero(sizes == 0).astype(np.int32) + begin
    inside = np.searchsorted(part.first, missing, side="right") - 1
    reach = np.concatenate([part.last, [-1]])  # of no group, for those before the first
    missing = missing[reach[inside] < missing]
    if not len(missing):
        return part
    where = np.searchsorted(part.first, missing, side="left")
    shown = list(part.shown)
    sign = "<>" if ascii else NOTHING
    for at in reversed(where.tolist()):
        shown.insert(at, sign)
    return _Part(
        shown,
        np.insert(part.widths, where, len(sign)),
        np.insert(part.first, where, missing),
        np.insert(part.last, where, missing),
        np.insert(part.kinds, where, SYMBOL),
    )


@lru_cache(8192)
def _shown(char: str, ascii: bool) -> tuple[str, int, int]:
    """What is printed of one character, its kind, and its cells: 0 for a mark."""
    code = ord(char)
    if 0x20 < code < 0x7F:
        return char, TEXT, 1
    if char == " ":
        return char, SPACE, 1
    if char == "\n":
        return ("\\n", NEWLINE, 2) if ascii else ("↵", NEWLINE, 1)
    if char == "\t":
        return ("\\t", SYMBOL, 2) if ascii else ("⇥ ", SYMBOL, 2)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}", SYMBOL, 4
    if ascii:
        spelt = char.encode("ascii", "backslashreplace").decode()
        spelt = f"\\x{code:02x}" if len(spelt) == 1 else spelt
        return spelt, SYMBOL, len(spelt)
    if steady(char) != char:
        return steady(char), SYMBOL, 2 if 0x1F1E6 <= code <= 0x1F1FF else len(steady(char))
    columns = get_character_cell_size(char)
    return char, SPACE if char == "\u3000" else TEXT, columns


@lru_cache(8192)
def steady(char: str) -> str:
    """The character, or what is shown instead where terminals would not agree on its width."""
    code = ord(char)
    if char == "\n" or 0x20 <= code < 0x7F:
        return char
    instead = visible(char)
    if instead != char:
        return instead
    if 0x1F1E6 <= code <= 0x1F1FF:  # letters of flags, which pair up in some terminals
        return chr(0xFF21 + code - 0x1F1E6)
    if any(low <= code <= high for low, high in _RANGES_OF_SELECTORS):
        return NO_WIDTH
    category = unicodedata.category(char)
    if category in ("Cn", "Co"):  # nobody knows how wide
        return char.encode("ascii", "backslashreplace").decode()
    if category in ("Mn", "Me", "Mc"):
        return char
    return NO_WIDTH if category == "Cf" or get_character_cell_size(char) == 0 else char
