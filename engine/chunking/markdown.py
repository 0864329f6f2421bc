"""The blocks of Markdown, line by line: CommonMark's block structure with GitHub's tables.

Linear in the text whatever it holds: every line is looked at once, at most `DEPTH` levels deep.
Not told apart from paragraphs, as nothing depends on it: rules, link definitions, and HTML but for
comments and raw text.
"""

from __future__ import annotations

import re

from engine.chunking.outline import (
    CODE,
    HEADING,
    ITEM,
    NONE,
    PARAGRAPH,
    QUOTE,
    TABLE,
    TOP,
    Outline,
)

DEPTH = 20
"""Quotes and list items deeper than this are text."""

_INDENTED = 100  # a leaf of code by indentation
_TAB = 4
_SPACE = re.compile(r"[ \t]*")
_HEADING = re.compile(r"#{1,6}(?=[ \t]|\Z)")
_FENCE = re.compile(r"(`{3,})(?=[^`]*\Z)|(~{3,})")
_ITEM = re.compile(r"(?:[-+*]|(\d{1,9})[.)])(?=[ \t]|\Z)")
_RULE = re.compile(r"(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})\Z")
_UNDERLINE = re.compile(r"(?:(=+)|-+)[ \t]*\Z")
_DELIMITERS = re.compile(r"\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*\Z")
_CELL_END = re.compile(r"(?<!\\)\|")
_RAW = re.compile(
    r"<(?:(?P<raw>script|pre|style|textarea)(?=[\s>]|\Z)|(?P<comment>!--)|(?P<pi>\?)"
    r"|(?P<cdata>!\[CDATA\[)|(?P<declaration>![A-Za-z]))",
    re.IGNORECASE,
)
_RAW_ENDS = {
    "raw": re.compile(r"</(?:script|pre|style|textarea)>", re.IGNORECASE),
    "comment": re.compile("-->"),
    "pi": re.compile(r"\?>"),
    "cdata": re.compile(r"\]\]>"),
    "declaration": re.compile(">"),
}
_FRONT_MATTER = re.compile(r"---[ \t]*\n(?:.*\n)*?(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*\)")
_MARKUP = re.compile(r"[`*]+")
_TITLE_MOST = 200  # characters


def outline_of(text: str) -> Outline:
    """The blocks of Markdown, lines ended by LF."""
    return _Scanner(text).outline


def title_of(text: str, start: int, end: int) -> str:
    """What the heading block `[start, end)` says, without its markup, on one line."""
    source = text[start : min(end, start + 4 * _TITLE_MOST)].strip()
    if source.startswith("#"):
        line = source.split("\n", 1)[0].lstrip("#").strip()
        bare = line.rstrip("#")
        source = bare if bare.endswith((" ", "\t")) or not bare else line
    else:
        lines = source.split("\n")
        source = " ".join(lines[:-1] if len(lines) > 1 else lines)
    said = _MARKUP.sub("", _LINK.sub(r"\1", source))
    return " ".join(said.split())[:_TITLE_MOST]


class _Scanner:
    """Reads line after line into an outline.

    The leaf is the block that the next line may go on: what it is (of `PARAGRAPH`, `TABLE`, `CODE`
    for fenced and raw text, `_INDENTED`, or `NONE`), and how many containers it is in.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.outline = Outline(len(text))
        self._containers: list[tuple[int, int]] = []  # the block's number; an item's indent, or 0
        self._depth = 0  # how many of them the line is inside of
        self._leaf, self._kind, self._leaf_depth = NONE, NONE, 0
        self._last = (0, 0, 0)  # the paragraph's last line: where it, its text and its end are
        self._fence = ("", 0)
        self._raw_end: re.Pattern[str] | None = None
        place = 0
        matter = _FRONT_MATTER.match(text) if text.startswith("---") else None
        if matter:
            self.outline.add(0, CODE, NONE, TOP)
            place = matter.end() + 1
        while place < len(text):
            end = text.find("\n", place)
            end = len(text) if end < 0 else end
            self._line(place, end)
            place = end + 1

    def _line(self, start: int, end: int) -> None:
        cursor, column = self._enter(start, end)
        stop = self._text_at(cursor, end)
        inside = self._depth >= self._leaf_depth
        if self._kind == CODE and inside:
            if self._closes_code(stop, end, self._width(cursor, stop, column)):
                self._kind = NONE
            return
        if stop == end:
            del self._containers[self._depth :]
            if not (self._kind == _INDENTED and inside):
                self._kind = NONE
            return
        going = self._kind  # what the line may go on
        if not inside and going != PARAGRAPH:
            going = NONE
        while (indent := self._width(cursor, stop, column)) < _TAB:
            if self._text[stop] == ">" and self._depth < DEPTH:
                self._open(start, QUOTE, 0)
                cursor, column = self._skip(stop + 1, end, column + indent + 1, 1)
            elif (going == PARAGRAPH and inside and self._underlines(stop, end)) or self._begins(
                start, stop, end
            ):
                return
            elif self._depth < DEPTH and (
                mark := self._item(stop, end, going == PARAGRAPH and inside)
            ):
                column += indent + mark - stop
                width = self._width(mark, self._text_at(mark, end), column)
                if self._text_at(mark, end) == end or width > _TAB:
                    width = 1
                self._open(start, ITEM, indent + mark - stop + width)
                cursor, column = self._skip(mark, end, column, width)
            else:
                break
            going = NONE
            stop = self._text_at(cursor, end)
            if stop == end:
                return
        if going == PARAGRAPH:
            if not (inside and indent < _TAB and self._makes_table(stop, end)):
                self._last = start, stop, end
        elif indent >= _TAB:
            if going != _INDENTED:
                self._add(start, CODE)
                self._kind = _INDENTED
        elif going != TABLE:
            self._add(start, PARAGRAPH)
            self._last = start, stop, end

    def _text_at(self, cursor: int, end: int) -> int:
        """Where the white space at `cursor` ends."""
        found = _SPACE.match(self._text, cursor, end)
        return found.end() if found else cursor

    def _width(self, cursor: int, stop: int, column: int) -> int:
        """Columns of white space."""
        if self._text.find("\t", cursor, stop) < 0:
            return stop - cursor
        before = " " * (column % _TAB)
        return len((before + self._text[cursor:stop]).expandtabs(_TAB)) - len(before)

    # Quotes and list items.

    def _enter(self, start: int, end: int) -> tuple[int, int]:
        """Goes past the marks of the quotes and the indents of the items that the line is inside
        of; where to, and in which column."""
        cursor, column = start, 0
        for depth, (_, indent) in enumerate(self._containers):
            self._depth = depth
            stop = self._text_at(cursor, end)
            width = self._width(cursor, stop, column)
            if indent:
                if stop == end:
                    continue
                if width < indent:
                    return cursor, column
                cursor, column = self._skip(cursor, end, column, indent)
            elif stop < end and width < _TAB and self._text[stop] == ">":
                cursor, column = self._skip(stop + 1, end, column + width + 1, 1)
            else:
                return cursor, column
        self._depth = len(self._containers)
        return cursor, column

    def _open(self, start: int, kind: int, indent: int) -> None:
        """A quote or item begins, on the line that begins at `start`."""
        del self._containers[self._depth :]
        parent = self._containers[-1][0] if self._containers else NONE
        following = kind == ITEM and self.outline.last_in(parent) == ITEM
        rank = TOP + 2 * self._depth + following
        self._containers.append((self.outline.add(start, kind, parent, rank), indent))
        self._depth += 1
        self._kind = NONE

    def _item(self, stop: int, end: int, in_paragraph: bool) -> int:
        """Where a list item's mark ends; 0 where none is."""
        found = _ITEM.match(self._text, stop, end)
        if not found:
            return 0
        if in_paragraph and (found[1] not in (None, "1") or self._text_at(found.end(), end) == end):
            return 0  # only what is clearly a list begins within a paragraph
        return found.end()

    def _skip(self, cursor: int, end: int, column: int, width: int) -> tuple[int, int]:
        """Past at most so many columns of white space; a tab is taken whole."""
        until = column + width
        while cursor < end and column < until and self._text[cursor] in " \t":
            column += self._width(cursor, cursor + 1, column)
            cursor += 1
        return cursor, column

    # What is in them.

    def _add(self, start: int, kind: int) -> int:
        """A leaf begins."""
        del self._containers[self._depth :]
        parent = self._containers[-1][0] if self._containers else NONE
        self._kind, self._leaf_depth = kind, self._depth
        self._leaf = self.outline.add(start, kind, parent, TOP + 2 * self._depth)
        return self._leaf

    def _heading(self, number: int, level: int) -> None:
        self.outline.kind[number] = HEADING
        if not self._depth:
            self.outline.rank[number] = level
            self.outline.add_heading(number)
        self._kind = NONE

    def _begins(self, start: int, stop: int, end: int) -> bool:
        """Whether the line begins a block that may also end a paragraph."""
        char = self._text[stop]
        if char == "#" and (found := _HEADING.match(self._text, stop, end)):
            self._heading(self._add(start, HEADING), found.end() - stop)
        elif char in "`~" and (found := _FENCE.match(self._text, stop, end)):
            self._add(start, CODE)
            self._fence, self._raw_end = (char, found.end() - stop), None
        elif char in "*-_" and _RULE.match(self._text, stop, end):
            self._add(start, PARAGRAPH)
            self._kind = NONE
        elif char == "<" and (found := _RAW.match(self._text, stop, end)):
            self._add(start, CODE)
            self._raw_end = _RAW_ENDS[str(found.lastgroup)]
            if self._raw_end.search(self._text, stop + 2, end):
                self._kind = NONE
        else:
            return False
        return True

    def _closes_code(self, stop: int, end: int, indent: int) -> bool:
        if self._raw_end:
            return self._raw_end.search(self._text, stop, end) is not None
        char, length = self._fence
        if indent >= _TAB or not self._text.startswith(char * length, stop, end):
            return False
        return not self._text[stop:end].lstrip(char).strip(" \t")

    def _underlines(self, stop: int, end: int) -> bool:
        """Whether the line makes a heading of the paragraph before it; it is made one then."""
        found = _UNDERLINE.match(self._text, stop, end)
        if found:
            self._heading(self._leaf, 1 if found[1] else 2)
        return found is not None

    def _makes_table(self, stop: int, end: int) -> bool:
        """Whether the line makes the paragraph's last line a table's header; it is made one."""
        start, first, last = self._last
        if not _DELIMITERS.match(self._text, stop, end):
            return False
        header = self._text[first:last]
        if "|" not in header or _cells(header) != _cells(self._text[stop:end]):
            return False
        if start == self.outline.start[self._leaf]:
            self.outline.kind[self._leaf] = TABLE
            self._kind = TABLE
        else:
            self._add(start, TABLE)
        self.outline.heads[self._leaf] = min(end + 1, len(self._text))
        return True


def _cells(line: str) -> int:
    """How many cells a table's row has."""
    inner = line.strip().removeprefix("|")
    if inner.endswith("|") and not inner.endswith("\\|"):
        inner = inner[:-1]
    return len(_CELL_END.findall(inner)) + 1
