"""Lines in, answers out in the same order, with a bounded number of lines between the two."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from cbcli.errors import Failure
from cbcli.lines.output import OutputFile
from cbcli.lines.prompts import BadLine, LineParser, PromptLine
from cbcli.lines.reader import LineReader
from cbcli.lines.runner import Answer
from engine.workers import Done, WorkerPool

AHEAD = 4  # lines a worker, that may be taken before the answer to the first of them is out


class LineSource:
    """Prompts from a reader's lines; what needs no model comes as its answer already: lines that
    are no prompts, and those an earlier run answered into `output`."""

    def __init__(
        self, reader: LineReader, parser: LineParser, output: OutputFile | None = None
    ) -> None:
        self._reader, self._parser, self._output = reader, parser, output

    @property
    def ended(self) -> bool:
        """Whether everything was taken."""
        return self._reader.ended

    def fileno(self) -> int | None:
        """As `LineReader.fileno`."""
        return self._reader.fileno()

    def fill(self) -> None:
        """As `LineReader.fill`."""
        self._reader.fill()

    def take(self) -> PromptLine | Answer | None:
        """The next prompt or answer; None where `fill` must come first, and at the end."""
        while (raw := self._reader.take()) is not None:
            line = self._parser.parse(raw)
            if line is None:
                continue
            number, digest = line.name.number, line.name.digest
            if self._output is not None and (kept := self._output.kept(number, digest)):
                return Answer(number, {}, kept=kept)
            return Answer.bad(line) if isinstance(line, BadLine) else line
        return None


def in_turn(source: LineSource, answer: Callable[[PromptLine], Answer]) -> Iterator[Answer]:
    """Each line answered before the next one is read."""
    while not source.ended:
        item = source.take()
        if item is None:
            source.fill()
        else:
            yield answer(item) if isinstance(item, PromptLine) else item


class Several(Protocol):
    """What computes the answers of several lines at the same time."""

    def begin(self, line: PromptLine) -> UnderWay | Answer:
        """A line taken in, or its answer where that is known at once."""

    def go_on(self) -> None:
        """Goes on with all lines that were taken in."""


class UnderWay(Protocol):
    """A line that was taken in."""

    @property
    def done(self) -> bool: ...

    def answer(self) -> Answer:
        """To be asked once, when it is done."""


def at_once(source: LineSource, several: Several, most: int) -> Iterator[Answer]:
    """Up to `most` lines answered at the same time. Where input is slow to come, those that have
    come are answered first."""
    waiting: deque[UnderWay | Answer] = deque()
    while True:
        while len(waiting) < most and (item := source.take()) is not None:
            waiting.append(item if isinstance(item, Answer) else several.begin(item))
        if not waiting:
            if source.ended:
                return
            source.fill()
            continue
        first = waiting[0]
        if isinstance(first, Answer) or first.done:
            waiting.popleft()
            yield first if isinstance(first, Answer) else first.answer()
        elif len(waiting) < most and not source.ended and _ready(source):
            source.fill()
        else:
            several.go_on()


def _ready(source: LineSource) -> bool:
    """Whether there is input, or its end."""
    number = source.fileno()
    return number is None or bool(select.select([number], [], [], 0)[0])


def shared(
    source: LineSource, pool: WorkerPool[PromptLine, Answer], workers: int
) -> Iterator[Answer]:
    """Lines answered by several workers at once. Input that is slow to come holds nothing up."""
    ready: dict[int, Answer] = {}
    asked: dict[int, PromptLine] = {}
    first = last = 0  # the next to give out, and the next to take in
    while True:
        while last - first < AHEAD * workers and (item := source.take()) is not None:
            if isinstance(item, Answer):
                ready[last] = item
            else:
                asked[last] = item
                pool.submit(last, item)
            last += 1
        if first in ready:
            yield ready.pop(first)
            first += 1
            continue
        more = last - first < AHEAD * workers and not source.ended
        if not more and first == last:
            return
        waitable = source.fileno() if more else None
        if more and waitable is None:
            source.fill()
            continue
        finished, readable = pool.wait(waitable)
        for outcome in finished:
            line = asked.pop(outcome.ticket)
            if isinstance(outcome, Done):
                ready[outcome.ticket] = outcome.result
            else:
                failure = Failure("failed", outcome.reason, "run it with --device alone", 1)
                ready[outcome.ticket] = Answer.failed(line.name, failure)
        if readable:
            source.fill()
