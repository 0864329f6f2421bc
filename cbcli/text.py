"""Text that came from a document, a model or a file name, made harmless to print.

Such text is data. Printed as it is, an escape sequence in a document drives the terminal, a lone
carriage return hides what stood on the line, and a bidirectional override shows words in another
order than they have. Here every such character is shown as itself instead of being obeyed.
"""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"


def _shown() -> dict[int, str]:
    table: dict[int, str] = {}
    for code in range(0x20):
        if chr(code) not in _KEPT:
            table[code] = chr(0x2400 + code)  # Unicode has a picture of every C0 control: ESC is ␛
    table[0x7F] = "\u2421"
    for code in range(0x80, 0xA0):  # C1: one of them, 0x9b, starts a sequence as ESC [ does
        table[code] = f"\\x{code:02x}"
    # Embeddings, overrides, isolates and their ends; and the separators some programs break at.
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029):
        table[code] = f"\\u{code:04x}"
    for code in range(0xD800, 0xE000):  # half a pair, as undecodable file names have: no encoder
        table[code] = f"\\u{code:04x}"
    return table


_SHOWN = _shown()
_ONE_LINE = {**_SHOWN, ord("\n"): "\u21b5", ord("\t"): " "}


def visible(text: str) -> str:
    """`text` with every control character but newline and tab, every bidirectional control and
    every lone surrogate replaced by something to look at. Windows line ends become newlines."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def one_line(text: str) -> str:
    """`visible`, and on one line: newlines become ↵ and tabs spaces."""
    return text.replace("\r\n", "\n").translate(_ONE_LINE)


class VisibleStream:
    """`visible` for text that arrives in pieces: what is written doesn't depend on the cuts."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        """The part of the text so far that can be shown now."""
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") else ""  # perhaps half of a Windows line end
        return visible(text[:-1] if self._held else text)

    def finish(self) -> str:
        """What was still held back."""
        text, self._held = self._held, ""
        return visible(text)


def width(text: str) -> int:
    """Columns of a terminal that one line of `text` takes."""
    if text.isascii():
        return len(text)
    columns = 0
    for char in text:
        if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
            continue
        columns += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return columns


def shorten(text: str, columns: int) -> str:
    """`text` cut to `columns` terminal columns, its end marked with an ellipsis where cut."""
    if width(text) <= columns:
        return text
    kept, used = [], 0
    for char in text:
        step = width(char)
        if used + step > columns - 1:
            break
        kept.append(char)
        used += step
    return "".join(kept) + "…"
