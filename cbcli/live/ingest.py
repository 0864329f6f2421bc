"""Documents while they are brought into the store: how far it is, and the last chunks written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.cells import cell_len

from cbcli.inspect.lines import (
    EMPTY,
    Line,
    Span,
    bar,
    fit,
    left,
    line,
    safe,
    span,
    table,
    width_of,
)
from cbcli.inspect.theme import Look
from cbcli.units import duration_text, rate_text, size_text

if TYPE_CHECKING:
    from cache_store.catalog import ChunkText
    from engine.ingest import IngestReport
    from engine.ingest_plan import IngestPlan

BAR = 24  # cells
LABEL = 11
SOURCE = 28  # cells of a document's name, at most
TEXT = 400  # characters of a chunk that are looked at, for its first words


class IngestScene:
    """A `Scene`. name: how a document is called; clock: in seconds."""

    def __init__(
        self,
        name: Callable[[str], str] = lambda source: source,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._clock = name, clock
        self._began = clock()
        self._label, self._facts = "beginning", ""
        self._work: tuple[IngestPlan, IngestReport] | None = None
        self._since: float | None = None  # when computing began
        self._chunks: dict[str, tuple[str, int, ChunkText]] = {}
        self._size: Callable[[int], int] = lambda tokens: 0

    def work(self, plan: IngestPlan, report: IngestReport, size: Callable[[int], int]) -> None:
        """What is to be done, and where it is told how far it is. size: bytes on disk of a chunk of
        so many tokens."""
        self._size = size
        for document in plan.documents:
            for number, chunk in enumerate(document.chunks, 1):
                if chunk.chunk_id in plan.missing:
                    self._chunks.setdefault(chunk.chunk_id, (document.source, number, chunk))
        self._work = plan, report

    def computing(self) -> None:
        """Rates count from now on."""
        self._since = self._clock()

    def told(self, label: str, facts: str) -> None:
        self._label, self._facts = label, facts

    def status(self) -> str:
        return safe(f"{self._label}: {self._facts}")

    def lines(self, columns: int, rows: int | None, look: Look) -> list[Line]:
        now = self._clock()
        took = duration_text(now - self._began)
        shown = [line(span(f"ingest, {self._label}", "bold"), span(f"  {took}", "dim"))]
        if self._work is None:
            return [*shown, line(span(f"  {self._facts}", "dim"))]
        plan, report = self._work
        shown += self._amounts(plan, report, now, look)
        room = 1000 if rows is None else rows - len(shown) - 3
        latest = [name for name in report.latest if name in self._chunks][-room:]
        if room > 0 and latest:
            shown += [EMPTY, line(span("last chunks written", "title dim"))]
            shown += self._written(latest, columns)
        return shown if rows is None else shown[:rows]

    def _amounts(
        self, plan: IngestPlan, report: IngestReport, now: float, look: Look
    ) -> list[Line]:
        """How much of each thing is done."""
        tokens, size = report.computed_tokens, report.computed_bytes
        seconds = now - self._since if self._since is not None else 0.0
        rate = tokens / seconds if seconds > 0 else 0.0
        parts = [
            ("documents", report.documents, len(plan.documents), ""),
            ("chunks", report.computed_chunks, len(plan.missing), ""),
            ("tokens", tokens, plan.tokens, rate_text(rate, "tokens") if tokens else ""),
        ]
        shown = []
        for label, done, whole, more in parts:
            filled = left(bar(done / whole if whole else 1.0, BAR, look.ascii), BAR)
            facts = f"{done:,} of {whole:,}" + (f", {more}" if more else "")
            shown.append(
                line(span(left(label, LABEL), "dim"), Span(filled, "recompute"), span(f"  {facts}"))
            )
        stored = f"{size_text(size)} of {size_text(plan.nbytes)}"
        if size and seconds > 0:
            stored += f", {rate_text(size / seconds, 'bytes')}"
        shown.append(line(span(left("stored", LABEL), "dim"), span(stored)))
        remains = plan.tokens - tokens
        time_left = duration_text(remains / rate) if rate and remains > 0 else "-"
        shown.append(line(span(left("time left", LABEL), "dim"), span(time_left)))
        return shown

    def _written(self, latest: list[str], columns: int) -> list[Line]:
        found = [self._chunks[name] for name in latest]
        called = [_end(safe(self._name(source)), SOURCE) for source, _, _ in found]
        rows = [
            (name, f"{number}", f"{chunk.tokens:,}", size_text(self._size(chunk.tokens)))
            for name, (_, number, chunk) in zip(called, found, strict=True)
        ]
        shown = table(("document", "chunk", "tokens", "size"), rows, "lrrr")
        room = columns - width_of(shown[0]) - 2
        words = ["", *(" ".join(chunk.text[:TEXT].split()) for _, _, chunk in found)]
        return [
            (*one, *fit(line(span("  " + text, "dim")), room)) if room > 8 else one
            for one, text in zip(shown, words, strict=True)
        ]


def _end(text: str, columns: int) -> str:
    """The end of a path, where all of it doesn't fit."""
    if cell_len(text) <= columns:
        return text
    while cell_len(text) >= columns:
        text = text[1:]
    return "…" + text
