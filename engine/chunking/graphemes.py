"""What a reader sees as one character: an extended grapheme cluster."""

from __future__ import annotations

import re
import unicodedata

_ZWJ = "\u200d"
# Code points that stand before the character they belong to (Arabic and Indic signs).
_PREPENDED = re.compile(
    "[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46\U00011f02]"
)
_EXTENDING = re.compile(
    f"[{_ZWJ}\u200c\u0e33\u0eb3\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
)
_VIRAMA = 9  # canonical combining class


def is_boundary(text: str, place: int, since: int = 0) -> bool:
    """Whether `text` may be cut before `place` without cutting what a reader sees as one
    character (an extended grapheme cluster; in doubt not). `since`: a boundary known before."""
    if place <= since or place >= len(text):
        return True
    before, after = text[place - 1], text[place]
    if before.isascii() and after.isascii():
        return (before, after) != ("\r", "\n")
    if before == _ZWJ or _PREPENDED.match(before):
        return False
    if _is_mark(after) or (_is_mark(before) and _joins_consonants(text, place, since)):
        return False
    if _is_regional(before) and _is_regional(after):  # flags are pairs
        first = place - 1
        while first > since and _is_regional(text[first - 1]):
            first -= 1
        return (place - first) % 2 == 0
    return not _is_hangul_joint(before, after)


def _is_mark(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Me", "Mc") or bool(_EXTENDING.match(char))


def _joins_consonants(text: str, place: int, since: int) -> bool:
    """Whether a virama among the marks before `place` ties the letter there to the one before."""
    if unicodedata.category(text[place]) != "Lo":
        return False
    while place > since and _is_mark(text[place - 1]):
        place -= 1
        if unicodedata.combining(text[place]) == _VIRAMA:
            return True
    return False


def _is_regional(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _is_hangul_joint(before: str, after: str) -> bool:
    """Whether two code points are parts of one Korean syllable."""
    kind = _hangul(before)
    return _hangul(after) in {
        "L": ("L", "V", "LV", "LVT"),
        "V": ("V", "T"),
        "LV": ("V", "T"),
        "T": ("T",),
        "LVT": ("T",),
    }.get(kind, ())


def _hangul(char: str) -> str:
    code = ord(char)
    if 0xAC00 <= code <= 0xD7A3:
        return "LV" if (code - 0xAC00) % 28 == 0 else "LVT"
    if 0x1100 <= code <= 0x115F or 0xA960 <= code <= 0xA97C:
        return "L"
    if 0x1160 <= code <= 0x11A7 or 0xD7B0 <= code <= 0xD7C6:
        return "V"
    if 0x11A8 <= code <= 0x11FF or 0xD7CB <= code <= 0xD7FB:
        return "T"
    return ""
