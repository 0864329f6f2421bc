"""The prompt as lines of a page: wrapped, in segments with heads, each made when it is shown."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cbcli.inspect.cells import NEWLINE, SYMBOL, TEXT, Cells, cells_of
from cbcli.inspect.lines import Line, Span, fit, left, span
from cbcli.inspect.run import Mask, Run, Segment, percent
from cbcli.inspect.theme import Look

GUTTER = 2
NO_HEAD = ("separator",)


@dataclass(frozen=True)
class Row:
    """One line. head: the one that names a segment, without groups; else groups [start, end)."""

    segment: int
    start: int
    end: int
    head: bool = False


@dataclass(frozen=True)
class Marks:
    """What is drawn on the text. steps int8 [N]: of the heat scale, token by token; matches: the
    tokens a search found."""

    steps: npt.NDArray[np.int8]
    selected: Mask
    cursor: int | None = None
    matches: Mask | None = None


@dataclass(frozen=True, eq=False)
class Page:
    """A prompt laid out for lines of `width` cells."""

    run: Run
    cells: Cells
    rows: Sequence[Row]
    width: int
    look: Look

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.array([row.start for row in self.rows], dtype=np.int64)

    def row_of_token(self, token: int) -> int:
        """The line where a token begins."""
        return self._row_of_cell(self.cells.of_token(token)[0])

    def rows_of_token(self, token: int) -> range:
        """All lines a token is on."""
        start, end = self.cells.of_token(token)
        return range(self._row_of_cell(start), self._row_of_cell(max(start, end - 1)) + 1)

    def _row_of_cell(self, cell: int) -> int:
        # A head starts where the line behind it does, and comes before it.
        return max(0, int(np.searchsorted(self._starts, cell, side="right")) - 1)

    def token_at(self, row: int, column: int) -> int | None:
        """The token shown there, the nearest of that line; None on a head."""
        if not 0 <= row < len(self.rows):
            return None
        at = self.rows[row]
        if at.head or at.start == at.end:
            return None
        reach = np.cumsum(self.cells.widths[at.start : at.end])
        cell = at.start + min(
            int(np.searchsorted(reach, column - GUTTER, side="right")), at.end - at.start - 1
        )
        return int(self.cells.first[cell])

    def column_of_token(self, token: int) -> int:
        """Where in its line a token begins."""
        cell = self.cells.of_token(token)[0]
        start = self.rows[self._row_of_cell(cell)].start
        return GUTTER + int(self.cells.widths[start:cell].sum())

    def line(self, number: int, marks: Marks) -> Line:
        """One line as it is shown, of `width` cells."""
        row = self.rows[number]
        segment = self.run.segments[row.segment]
        if row.head:
            return head(self.run, segment, self.width, self.look)
        sign = self.look.status_signs[segment.status]
        parts = [Span(sign, segment.status), Span(" ")]
        used, role, text = GUTTER, "", ""
        for cell in range(row.start, row.end):
            width = int(self.cells.widths[cell])
            if used + width > self.width:
                break  # the space a line was cut behind
            used += width
            now = self._role(cell, marks)
            if now != role and text:
                parts.append(Span(text, role))
                text = ""
            role = now
            text += self.cells.shown[cell]
        if text:
            parts.append(Span(text, role))
        return (*parts, Span(" " * (self.width - used)))

    def _role(self, cell: int, marks: Marks) -> str:
        first, last = int(self.cells.first[cell]), int(self.cells.last[cell])
        several = slice(first, last + 1)
        kind = int(self.cells.kinds[cell])
        words = ["sym"] if kind in (SYMBOL, NEWLINE) else []
        step = int(marks.steps[first] if first == last else marks.steps[several].max())
        if step:
            words.append(f"h{step}")
        if marks.selected[first] if first == last else marks.selected[several].any():
            words.append("sel")
        if marks.matches is not None and marks.matches[several].any():
            words.append("match")
        if marks.cursor is not None and first <= marks.cursor <= last:
            words.append("cur")
        return " ".join(words)


def lay_out(run: Run, width: int, look: Look) -> Page:
    """The page of a run, for lines of `width` cells (at least 12)."""
    width = max(12, width)
    cuts = [segment.end for segment in run.segments]
    cells = cells_of(run.trace.tokens, cuts, ascii=look.ascii)
    if look.ascii:
        cells = bracketed(cells, run.selected)
    rows: list[Row] = []
    starts = np.searchsorted(cells.first, [segment.start for segment in run.segments])
    bounds = [*starts.tolist(), len(cells.shown)]
    for number, segment in enumerate(run.segments):
        low, high = bounds[number], bounds[number + 1]
        if segment.kind not in NO_HEAD:
            rows.append(Row(number, low, low, head=True))
        flow = segment.kind == "separator"  # its line ends are shown, but not made
        rows += _wrapped(cells, number, low, high, width - GUTTER - 1, flow=flow)
    return Page(run, cells, rows, width, look)


def _wrapped(
    cells: Cells, segment: int, low: int, high: int, columns: int, *, flow: bool
) -> list[Row]:
    """Lines of at most `columns` cells, and the space a line was cut behind: cut at line ends, then
    behind spaces and wide characters, then anywhere."""
    widths, kinds = cells.widths[low:high], cells.kinds[low:high]
    count = high - low
    reach = [0, *np.cumsum(widths).tolist()]
    newlines = np.flatnonzero((kinds == NEWLINE) & (not flow)).tolist()
    breaks = (kinds != TEXT) | (widths > 1)
    last_break = np.maximum.accumulate(np.where(breaks, np.arange(count), -1)) if count else breaks
    rows: list[Row] = []
    at = 0
    while at < count:
        end = max(bisect_right(reach, reach[at] + columns) - 1, at + 1)
        line_end = bisect_left(newlines, at)
        if line_end < len(newlines) and newlines[line_end] <= end:
            end = min(newlines[line_end] + 1, count)
        elif end < count:
            if kinds[end] == 1:  # a space at the edge
                end += 1
            elif int(last_break[end - 1]) >= at:
                end = int(last_break[end - 1]) + 1
        rows.append(Row(segment, low + at, low + end))
        at = end
    return rows


def bracketed(cells: Cells, selected: Mask) -> Cells:
    """With [ and ] around every run of selected tokens, for screens without an underline."""
    counts = np.concatenate([[0], np.cumsum(selected)])
    marked = counts[cells.last + 1] > counts[cells.first]
    before = marked & ~np.concatenate([[False], marked[:-1]])
    after = marked & ~np.concatenate([marked[1:], [False]])
    shown, widths = list(cells.shown), cells.widths.copy()
    for cell in np.flatnonzero(before):
        shown[cell] = "[" + shown[cell]
        widths[cell] += 1
    for cell in np.flatnonzero(after):
        shown[cell] += "]"
        widths[cell] += 1
    return replace(cells, shown=shown, widths=widths)


def head(run: Run, segment: Segment, width: int, look: Look) -> Line:
    """The line that names a segment: its number and name, status, tokens, how many recomputed."""
    chosen = int(run.selected[segment.start : segment.end].sum())
    name = f"{segment.number} {segment.name}" if segment.number else segment.name
    name = left(span(name).text, max(12, width - 54)).rstrip()
    parts = [Span(look.rule * 2 + " ", "dim"), span(name, "title"), Span(" ")]
    facts = f"{segment.status}, {segment.tokens:,} token{'s' * (segment.tokens != 1)}"
    parts.append(Span(facts, segment.status))
    if segment.status in ("hit", "exact") and segment.kind == "chunk":
        share = percent(chosen, segment.tokens)
        parts.append(Span(f", {chosen:,} recomputed ({share})", "dim"))
    used = sum(len(part.text) for part in parts)
    if used < width:
        parts.append(Span(" " + look.rule * width, "dim"))
    shown = fit(tuple(parts), width)
    # What a rule is cut with is no ellipsis.
    return tuple(
        part._replace(text=part.text.replace("…", look.rule))
        if part.text.endswith(look.rule + "…")
        else part
        for part in shown
    )


def find(run: Run, text: str) -> list[tuple[int, int]]:
    """The tokens [start, end) that hold each place where `text` is, capital letters or not."""
    needle = text.encode("utf-8", "surrogateescape").lower()
    if not needle:
        return []
    ends = run.trace.tokens.ends
    found = []
    for hit in re.finditer(re.escape(needle), run.trace.tokens.text.lower()):
        first = int(np.searchsorted(ends, hit.start(), side="right"))
        last = int(np.searchsorted(ends, hit.end() - 1, side="right"))
        found.append((first, last + 1))
    return found
