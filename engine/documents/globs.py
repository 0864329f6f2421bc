"""Patterns as in `.gitignore`, many of them looked up with one regular expression.

A path is matched by itself, never through a folder above it: a walk does not enter folders that
are left out, so what it comes upon lies in none.

Not pathspec's translation (1.1): that matches through folders above, knows no `[[:digit:]]`, fails
at `[b-a]`, and a pattern of a dozen stars keeps it busy for seconds on one name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_POSIX = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r"\ \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\ \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}

MOST_BRACES = 1000
_TOGETHER = 500  # patterns in one regular expression


@dataclass(frozen=True)
class Glob:
    """One pattern. keep: it began with `!`; folders: it ended with a slash, and is of folders
    alone; whole: matched against the path from where its file lies, else against the last name;
    dotted: its last part begins with a dot, so that it is of hidden files."""

    regex: str
    keep: bool
    folders: bool
    whole: bool
    dotted: bool

    @classmethod
    def read(cls, line: str) -> Glob | None:
        """A line of an ignore file; None for a comment, an empty line, and what git cannot read
        either."""
        text = line.removesuffix("\n").removesuffix("\r")
        if text.startswith("#"):
            return None
        bare = text.rstrip(" ")
        if len(bare) < len(text) and (len(bare) - len(bare.rstrip("\\"))) % 2:
            bare += " "  # a space behind a backslash counts
        keep = bare.startswith("!")
        pattern = bare[1:] if keep else bare
        folders = pattern.endswith("/")
        pattern = pattern.removesuffix("/")
        whole = "/" in pattern
        pattern = pattern.removeprefix("/")
        if not pattern:
            return None
        parts = _parts(pattern)
        regex = None if parts is None else _path(parts, whole)
        if parts is None or regex is None:
            return None
        return cls(regex, keep, folders, whole, dotted=parts[-1].startswith("."))


class Globs:
    """Patterns of which the last one that matches counts."""

    def __init__(self, globs: Sequence[Glob]) -> None:
        self.globs = tuple(globs)
        self._of_files = _Lookup([(n, g) for n, g in enumerate(globs) if not g.folders])
        self._of_folders = _Lookup(list(enumerate(globs)))

    @classmethod
    def read(cls, lines: Iterable[str]) -> Globs:
        return cls([glob for line in lines if (glob := Glob.read(line)) is not None])

    def match(self, path: str, name: str, folder: bool) -> Glob | None:
        """The pattern that counts. path: from where the patterns' file lies, with forward slashes;
        name: the last part of it."""
        number = (self._of_folders if folder else self._of_files).last(path, name)
        return None if number < 0 else self.globs[number]


class _Lookup:
    """A few regular expressions for all patterns of last names, a few for all of whole paths."""

    def __init__(self, globs: list[tuple[int, Glob]]) -> None:
        self._names = _Any([(number, g) for number, g in reversed(globs) if not g.whole])
        self._paths = _Any([(number, g) for number, g in reversed(globs) if g.whole])

    def last(self, path: str, name: str) -> int:
        """The highest number of those that match, -1 where none does."""
        return max(self._names.first(name), self._paths.first(path))


class _Any:
    """Numbered patterns, of which the first one that matches is told; many in one regular
    expression, but not too many: with its groups a match's time grows as their square."""

    def __init__(self, globs: Sequence[tuple[int, Glob]]) -> None:
        self._blocks: list[tuple[re.Pattern[str], list[int]]] = []
        for start in range(0, len(globs), _TOGETHER):
            block = globs[start : start + _TOGETHER]
            regex = "|".join(f"({glob.regex})" for _, glob in block)
            self._blocks.append((re.compile(regex, re.DOTALL), [number for number, _ in block]))

    def first(self, text: str) -> int:
        """Its number, -1 where none matches."""
        for regex, numbers in self._blocks:
            if (match := regex.fullmatch(text)) and match.lastindex:
                return numbers[match.lastindex - 1]
        return -1


def _parts(pattern: str) -> list[str] | None:
    """What stands between slashes; one in square brackets is none."""
    parts = [""]
    place = 0
    while place < len(pattern):
        end = place + 1
        if pattern[place] == "[":
            found = _set(pattern, end)
            if found is None:
                return None
            end = found[1]
        elif pattern[place] == "\\":
            end += 1
        piece = pattern[place:end]
        if piece in ("/", "\\/"):
            parts.append("")
        else:
            parts[-1] += piece
        place = end
    return parts


def _path(parts: list[str], whole: bool) -> str | None:
    """Parts between slashes; `**` stands for any number of folders, at the end for all within."""
    found = []
    last = len(parts) - 1
    for number, part in enumerate(parts):
        if part == "**" and whole:
            found.append("(?:.*/)?" if number < last else ".+")
            continue
        regex = _name(part)
        if regex is None:
            return None
        found.append(regex if number == last else f"{regex}/")
    return "".join(found)


def _name(part: str) -> str | None:
    """A part without slashes. Before each star but the last the first match is as good as any
    other: not trying others keeps a hostile pattern from taking for ever."""
    pieces = [""]
    place = 0
    while place < len(part):
        char = part[place]
        place += 1
        if char == "*":
            pieces.append("")
        elif char == "?":
            pieces[-1] += "[^/]"
        elif char == "[":
            found = _set(part, place)
            if found is None:
                return None
            piece, place = found
            pieces[-1] += piece
        elif char == "\\":
            if place == len(part):
                return None
            pieces[-1] += re.escape(part[place])
            place += 1
        else:
            pieces[-1] += re.escape(char)
    if len(pieces) == 1:
        return pieces[0]
    middle = "".join(f"(?>[^/]*?{piece})" for piece in pieces[1:-1] if piece)
    return f"{pieces[0]}{middle}[^/]*{pieces[-1]}"


def _set(part: str, place: int) -> tuple[str, int] | None:
    """What stands in square brackets, from behind the opening one; and the place behind it."""
    negated = part[place : place + 1] in ("!", "^")
    place += negated
    items: list[str] = []
    first = True
    while place < len(part):
        char = part[place]
        if char == "]" and not first:
            if not items:
                return r"[^\s\S]" if not negated else "[^/]", place + 1
            inside = "".join(items)
            return (f"[^/{inside}]" if negated else f"(?!/)[{inside}]"), place + 1
        first = False
        if part.startswith("[:", place) and (end := part.find(":]", place)) > 0:
            if part[place + 2 : end] not in _POSIX:
                return None
            items.append(_POSIX[part[place + 2 : end]])
            place = end + 2
            continue
        low = _char(part, place)
        if low is None:
            return None
        place = low[1]
        if part[place : place + 1] == "-" and part[place + 1 : place + 2] not in ("", "]"):
            high = _char(part, place + 1)
            if high is None:
                return None
            place = high[1]
            top = high[0] if low[0] <= high[0] else low[0]  # as git has it
            items.append(f"{re.escape(low[0])}-{re.escape(top)}")
        else:
            items.append(re.escape(low[0]))
    return None


def _char(part: str, place: int) -> tuple[str, int] | None:
    if part[place] == "\\":
        place += 1
    return (part[place], place + 1) if place < len(part) else None


def braces(pattern: str) -> list[str]:
    """`*.{md,txt}` as the patterns it stands for, as a shell would: `*.md`, `*.txt`. Raises
    ValueError where it stands for more than `MOST_BRACES`."""
    found, waiting = list[str](), [pattern]
    while waiting:
        if len(found) + len(waiting) > MOST_BRACES:
            raise ValueError(f"more than {MOST_BRACES} patterns")
        one = waiting.pop()
        options = _first_braces(one)
        if options:
            waiting += reversed(options)
        else:
            found.append(one)
    return found


def _first_braces(pattern: str) -> list[str]:
    """The pattern with each option of its first braces; empty where it has none."""
    depth, start, commas = 0, 0, list[int]()
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif char == "{":
            depth += 1
            if depth == 1:
                start, commas = place, []
        elif char == "," and depth == 1:
            commas.append(place)
        elif char == "}" and depth:
            depth -= 1
            if not depth and commas:
                edges = [start, *commas, place]
                options = [pattern[a + 1 : b] for a, b in pairwise(edges)]
                return [pattern[:start] + option + pattern[place + 1 :] for option in options]
        place += 1
    return []
