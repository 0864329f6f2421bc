"""The blocks of source code, whatever its language: by indentation and blank lines.

A block begins with a line that is not indented, or one that is behind a blank line; what is
indented deeper, and lines that only close or go on such as `}` and `else`, are inside of it.
Comments, decorators and the like belong to what directly follows them.
"""

from __future__ import annotations

import re

from engine.chunking.outline import DEFINITION, NONE, TOP, Outline

_INDENT = re.compile(r"[ \t]*")
_TAB = 4
_DEEPEST = 100
_GOES_ON = re.compile(
    r"[})\]{>]|(?:else|elif|elsif|except|finally|catch|rescue|ensure|then|do|begin|end|fi|done|esac"
    r"|when|in|and|or|#\s*(?:else|elif|endif|pragma))\b",
    re.IGNORECASE,
)
_LEADS = re.compile(r"@|#|//|/\*|\*|--|;|%|<!--|template\b|\[<?\w")
_DEFINES = re.compile(r"(?:async\s+)?(?:def|class)\b")
_QUOTES = re.compile(r'"""|\'\'\'')


def outline_of(text: str, language: str) -> Outline:
    """The blocks of code, lines ended by LF."""
    outline = Outline(len(text))
    opened: list[tuple[int, int]] = []  # number and indentation of the blocks around the line
    quotes = language == "python"
    after_blank, leads, quoted = True, False, ""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        found = _INDENT.match(text, start, end)
        stop = found.end() if found else start
        if stop == end:
            after_blank, leads = not quoted, False
        elif quoted:
            quoted = _open_quote(text, stop, end, quoted)
        else:
            indent = min(_DEEPEST, len(text[start:stop].expandtabs(_TAB)))
            goes_on = bool(opened) and _GOES_ON.match(text, stop, end) is not None
            begins = after_blank or (not indent and not leads)
            if quotes and not leads:
                begins = begins or _DEFINES.match(text, stop, end) is not None
            if begins and not goes_on:
                while opened and opened[-1][1] >= indent:
                    opened.pop()
                parent = opened[-1][0] if opened else NONE
                rank = TOP + 2 * len(opened) + (not after_blank)
                opened.append((outline.add(start, DEFINITION, parent, rank), indent))
            leads = _LEADS.match(text, stop, end) is not None
            after_blank = False
            if quotes:
                quoted = _open_quote(text, stop, end, "")
        start = end + 1
    return outline


def _open_quote(text: str, start: int, end: int, quoted: str) -> str:
    """The triple quotes that are open at the end of a line."""
    for found in _QUOTES.finditer(text, start, end):
        if not quoted:
            quoted = found[0]
        elif quoted == found[0]:
            quoted = ""
    return quoted
