"""Printed lines back to paragraphs: order of columns, headings by size, hyphens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_GAP = "   "  # between what stands apart on one line, as a table's cells
_ENDS = re.compile(r"[.!?:;。！？…][\"'”’»)\]]*$")
_BULLET = re.compile(r"(?:[•‣▪●○◦·*–—-]|\(?\d{1,3}[.)]|\(?[a-z][.)])\s")
_ENTRY = re.compile(r"…\s*[\divxl]*$")
_HYPHEN_END = re.compile(r"([^\W\d_]+)[-\u00ad\u2010]$")
_FIRST_WORD = re.compile(r"[^\W\d_]+")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_CJK = re.compile("[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")
_MARKDOWN = re.compile(r"(?=#{1,6}\s|`{3}|~{3}|[-=]{3,}\s*$)")


@dataclass(frozen=True, slots=True)
class Run:
    """Text on one line with no wide gap in it. x0, x1: its ends; y: its baseline, upwards; size:
    its font's height; all in points. fixed: all letters are of one width, as in programs."""

    text: str
    x0: float
    x1: float
    y: float
    size: float
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A printed line; parts: how many runs it has been joined of."""

    text: str
    x0: float
    x1: float
    y: float
    size: float
    parts: int = 1
    fixed: bool = False


@dataclass(frozen=True)
class Page:
    """A page's lines in reading order; top, bottom: of the page."""

    number: int
    top: float
    bottom: float
    lines: tuple[Line, ...]


def lines_of(runs: Sequence[Run]) -> tuple[Line, ...]:
    """A page's runs, in the order they were written, as lines in reading order."""
    steps = [a.y - b.y for a, b in pairwise(runs) if abs(a.y - b.y) > 0.3 * b.size]
    if sum(step < 0 for step in steps) > 0.7 * len(steps):  # as in a page that is turned
        runs = _downwards(runs)
    return tuple(_joined_lines(_ordered(list(runs))))


def paragraphs(pages: Sequence[Page]) -> tuple[str, list[tuple[int, int]], bool]:
    """The text of pages, where in it each begins with its number, and whether there are headings,
    which are written as in Markdown."""
    levels = _heading_levels(line for page in pages for line in page.lines)
    words = _words([line.text for page in pages for line in page.lines])
    parts: list[str] = []
    places: list[tuple[int, int]] = []
    length, level = 0, 0
    last: Line | None = None
    for page in pages:
        edge = min((line.x0 for line in page.lines if line.fixed), default=0.0)
        widest = max((line.x1 for line in page.lines), default=0.0)
        pitch = _pitch(page.lines)
        for nth, line in enumerate(page.lines):
            text = _indent(line, edge) + line.text
            is_text = len(text) > 200 or _ENTRY.search(text)
            new = 0 if is_text else levels.get(round(line.size), 0)
            glue = _glue(last, line, nth > 0, widest, pitch) if last else ""
            if new != level and last:
                glue = "\n\n"
            elif new and glue == "\n":
                glue = " "  # a heading is one line
            if glue == " ":
                cut, glue = _unhyphenated(parts[-1], text, words)
                parts[-1] = parts[-1][: len(parts[-1]) - cut]
                length -= cut
            if glue.startswith("\n") or not last:
                text = "#" * new + " " + text if new else _MARKDOWN.sub("\\\\", text, count=1)
            if nth == 0:
                places.append((length + len(glue), page.number))
            parts += [glue, text]
            length += len(glue) + len(text)
            last, level = line, new
    return "".join(parts) + "\n", places, bool(levels)


def _ordered(runs: list[Run]) -> list[Run]:
    """Runs that go to and fro between two columns, one column after the other."""
    gutter = _gutter(runs)
    if gutter is None:
        return runs
    across = [run for run in runs if run.x0 < gutter < run.x1]
    ordered: list[Run] = []
    rest = [run for run in runs if not run.x0 < gutter < run.x1]
    for heading in [*sorted(across, key=lambda run: -run.y), None]:
        above = [run for run in rest if heading is None or run.y > heading.y]
        rest = [run for run in rest if not (heading is None or run.y > heading.y)]
        for side in (True, False):
            column = [run for run in above if (run.x1 <= gutter) is side]
            ordered += _ordered(_downwards(column))
        if heading is not None:
            ordered.append(heading)
    return ordered


def _downwards(runs: Iterable[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (-round(run.y), run.x0))


def _gutter(runs: list[Run]) -> float | None:
    """Where prose in two columns is parted that was written across both; None where the order is
    right as it is, or a table's."""
    if len(runs) < 8:
        return None
    left, right = min(run.x0 for run in runs), max(run.x1 for run in runs)
    width = right - left
    best, fewest = 0.0, len(runs)
    for step in range(31):
        x = left + width * (0.35 + 0.01 * step)
        crossing = sum(run.x0 < x < run.x1 for run in runs)
        if crossing < fewest:
            best, fewest = x, crossing
    # The middle of the gap, so that no side's ragged edge is cut.
    ends = [run.x1 for run in runs if run.x1 <= best]
    starts = [run.x0 for run in runs if run.x0 >= best]
    if fewest > 0.25 * len(runs) or len(ends) < 4 or len(starts) < 4:
        return None
    sides = [run.x1 <= best for run in runs if not run.x0 < best < run.x1]
    turns = sum(a != b for a, b in pairwise(sides))
    if turns < 0.7 * min(len(ends), len(starts)):
        return None  # one column after the other already
    for side in (True, False):
        mine = [run for run in runs if (run.x1 <= best if side else run.x0 >= best)]
        column = max(run.x1 for run in mine) - min(run.x0 for run in mine)
        if median(len(run.text) for run in mine) < 20:
            return None
        if median(run.x1 - run.x0 for run in mine) < 0.6 * column:
            return None
    return best


def _joined_lines(runs: Iterable[Run]) -> Iterator[Line]:
    line: Line | None = None
    for run in runs:
        if line and abs(line.y - run.y) < 0.3 * max(line.size, run.size) and run.x0 >= line.x1 - 1:
            near = run.x0 - line.x1 < 0.8 * line.size
            text = line.text + (" " if near else _GAP) + run.text
            parts = line.parts + (not near)
            size = max(line.size, run.size)
            fixed = line.fixed and run.fixed
            line = Line(text, line.x0, run.x1, line.y, size, parts, fixed)
            continue
        if line:
            yield line
        line = Line(run.text, run.x0, run.x1, run.y, run.size, fixed=run.fixed)
    if line:
        yield line


def _heading_levels(lines: Iterable[Line]) -> dict[int, int]:
    """Levels of headings by their size in points: what is larger than most of the text."""
    sizes: Counter[int] = Counter()
    for line in lines:
        sizes[round(line.size)] += len(line.text)
    if not sizes:
        return {}
    body, most = sizes.most_common(1)[0]
    large = sorted((size for size in sizes if size >= 1.15 * body), reverse=True)
    if sum(sizes[size] for size in large) > 0.3 * most:
        return {}  # no headings: a page of large print among small
    return {size: min(level, 4) for level, size in enumerate(large, 1)}


def _pitch(lines: Sequence[Line]) -> float:
    """From one line to the next within a paragraph, as a share of the line's size."""
    steps = [
        (a.y - b.y) / b.size
        for a, b in pairwise(lines)
        if 0.5 * b.size < a.y - b.y < 2.5 * b.size and abs(a.size - b.size) < 0.1 * b.size
    ]
    return median(steps) if len(steps) > 3 else 1.2


def _glue(last: Line, line: Line, same_page: bool, widest: float, pitch: float) -> str:
    """What stands between two lines: a space, the end of a line or of a paragraph."""
    ended = bool(_ENDS.search(last.text))
    parted = bool(_HYPHEN_END.search(last.text))
    lower = line.text[:1].islower()
    step = (last.y - line.y) / line.size
    if not same_page or not 0 < step < 8 * pitch:  # another column or page
        return " " if not ended and (lower or parted) else "\n\n"
    if step > 1.25 * pitch + 0.05 or abs(last.size - line.size) > 0.15 * line.size:
        return "\n\n"
    if (last.fixed and line.fixed) or _ENTRY.search(last.text):
        return "\n"  # lines of a program, or of a table of contents
    if last.parts > 1 or line.parts > 1 or _BULLET.match(line.text):
        return "\n"
    if parted:
        return " "
    if line.x0 > last.x0 + 0.8 * line.size and ended:
        return "\n\n"  # the first line of a paragraph is set in
    right = max(widest if line.x1 > 0.5 * widest else 0.0, line.x1)
    short = right - last.x1 > 0.25 * max(1.0, right - min(last.x0, line.x0))
    if short and ended and not lower:
        return "\n\n"
    return "\n" if short and not lower else " "


def _indent(line: Line, edge: float) -> str:
    """Spaces in front of a program's line; edge: where those begin that are not set in."""
    if not line.fixed:
        return ""
    width = (line.x1 - line.x0) / max(1, len(line.text))
    return " " * min(40, round((line.x0 - edge) / max(1.0, width)))


def _words(texts: Iterable[str]) -> Counter[str]:
    """How often each word is in the lines, what was parted at their ends left out."""
    words: Counter[str] = Counter()
    parted = False
    for text in texts:
        found = _WORD.findall(text)
        words.update(word.lower() for word in found[parted : len(found)])
        last = _HYPHEN_END.search(text)
        if last:
            words[last[1].lower()] -= 1
        parted = bool(last)
    return words


def _unhyphenated(before: str, after: str, words: Counter[str]) -> tuple[int, str]:
    """How many characters to take off a line's end, and what to put there, before the next."""
    end, start = _HYPHEN_END.search(before), _FIRST_WORD.match(after)
    if end and start:
        first, second = end[1].lower(), start[0].lower()
        if words[f"{first}-{second}"] > 0 or not start[0].islower():
            return 0, ""
        if words[first + second] > 0 or not (words[first] > 0 and words[second] > 0):
            return 1, ""
        return 0, ""  # two words that the document has apart, too: rather the hyphen too many
    if before and after and _CJK.match(before[-1]) and _CJK.match(after[0]):
        return 0, ""
    return 0, " "
