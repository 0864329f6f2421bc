"""Everything a command prints. Data goes to stdout, all else to stderr.

A command makes one `Output` from its three common options and uses nothing else to print:

    out = Output(json=json, quiet=quiet, verbose=verbose)
    out.note("getting the model")        stderr; not with --quiet, nor in a --json pipeline
    with out.progress("reading", unit="tokens", total=n) as progress:
        progress.update(done)            a bar on a terminal; see the setting `progress`
    if out.json:
        out.data({"chunks": 3})          stdout, one line of JSON
    else:
        out.table(["chunk", "tokens"], rows, right=["tokens"])
        out.line("3 chunks")

Text is never markup, and text from documents and models is made harmless (`cbcli.text`) whatever
it goes to; JSON escapes by itself. Piped output has no colour and no boxes: columns are aligned
with spaces. On a terminal long tables, and what is printed within `out.paged()`, go to a pager.
With --json, stderr holds JSON lines only: errors, and warnings as {"warning": …}.
"""

from __future__ import annotations

import contextlib
import json as json_module
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO

from cache_store.errors import CacheblendError
from cbcli.display import Display
from cbcli.errors import Failure
from cbcli.listing import ListForm, Listing, Record, print_list
from cbcli.pager import fits, page, pager_command
from cbcli.progress import Progress
from cbcli.terminal import Looks, is_terminal
from cbcli.text import VisibleStream, one_line, shorten, visible, width

if TYPE_CHECKING:
    from cbcli.live.view import Scene, View


class Output:
    """Where and how a command prints.

    `json`, `quiet` and `verbose` are the command's options; `form`: how it is to list; `options`:
    settings given as flags, of which `progress` and `pager` count here. The streams default to the
    process's own at the moment of the call. `env` is read for what `cbcli.terminal.Looks` knows.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: int = 0,
        form: ListForm = ListForm(),  # noqa: B008
        options: Mapping[str, object] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.json = json or form.jsonl
        self.form = form
        self.quiet = quiet
        self.verbose = verbose
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._looks = Looks(env)
        self._env = env
        self._options = options or {}
        self._collected: list[str] | None = None
        self._progress: Progress | None = None
        self._live: tuple[Scene, View] | None = None
        self._pieces: VisibleStream | None = None
        self._at_line_start = True
        self._waiting: list[str] = []

    # -- stdout ---------------------------------------------------------------------------------

    def data(self, value: object) -> None:
        """One JSON document on one line. Not-a-number and infinities become null."""
        self._print(_json_line(value))
        self._print("", flush=True)

    def line(self, text: str = "", *, style: str = "") -> None:
        """`text`, which may have several lines, and a newline."""
        self._print(self._looks.styled(self._stdout, visible(text), style) + "\n")

    def table(
        self,
        headers: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        right: Collection[str] = (),
        once: Collection[str] = (),
    ) -> None:
        """Columns aligned with two spaces between them, those named in `right` to the right.

        On a terminal that is too narrow, columns named in `once` that say the same in all rows are
        left out and said in a note below, and the widest others are shortened; a pipe gets all of
        it.
        """
        cells = [[one_line(str(cell)) for cell in row] for row in (headers, *rows)]
        widths = _widths(cells)
        left_out: list[str] = []
        if is_terminal(self._stdout):
            columns = shutil.get_terminal_size().columns
            if _total(widths) > columns:
                cells, left_out = _without_alike(cells, once)
                headers, widths = cells[0], _widths(cells)
            _fit(widths, columns)

        def laid(row: Sequence[str]) -> str:
            parts = []
            for header, cell, columns in zip(headers, row, widths, strict=True):
                text = shorten(cell, columns)
                pad = " " * (columns - width(text))
                parts.append(pad + text if header in right else text + pad)
            return "  ".join(parts).rstrip()

        with self.paged():
            self._print(self._looks.styled(self._stdout, laid(cells[0]), "bold") + "\n")
            self._print("".join(laid(row) + "\n" for row in cells[1:]))
        if left_out:
            self._print("", flush=True)
            self.note(f"all of them: {', '.join(left_out)}")

    def list(
        self,
        listing: Listing,
        records: Iterable[Record],
        *,
        rows: Callable[[Record], Iterable[Record]] | None = None,
        around: Callable[[list[Any]], Record] | None = None,
    ) -> int:
        """A list of records as it is wanted; see `cbcli.listing.print_list`."""
        return print_list(self, listing, records, rows=rows, around=around)

    def pairs(self, pairs: Iterable[tuple[str, object]]) -> None:
        """`label  value` lines, the values aligned; a value with several lines stays in place."""
        shown = [(one_line(label), visible(str(value))) for label, value in pairs]
        columns = max((width(label) for label, _ in shown), default=0)
        for label, value in shown:
            pad = " " * (columns - width(label))
            text = value.replace("\n", "\n" + " " * (columns + 2))
            name = self._looks.styled(self._stdout, label, "bold")
            self._print(f"{name}{pad}  {text}".rstrip() + "\n")

    def piece(self, text: str) -> None:
        """A piece of streamed text, shown at once."""
        if self._pieces is None:
            self._pieces, self._at_line_start = VisibleStream(), True
        self._write_piece(self._pieces.push(text))

    def _print(self, text: str, *, flush: bool = False) -> None:
        if self._collected is not None:
            self._collected.append(text)
            return
        with to_stdout():
            self._stdout.write(text)
            if flush:
                self._stdout.flush()

    @contextlib.contextmanager
    def paged(self) -> Iterator[None]:
        """Within, what goes to stdout is held back and then, where it is longer than the terminal,
        shown in the user's pager. Nowhere else but on a terminal, and not as JSON."""
        wanted = self._collected is None and not self.json and is_terminal(self._stdout)
        command = pager_command(self._display.pager, self._env) if wanted else ""
        if not command:
            yield
            return
        self._collected, shown = [], False
        try:
            yield
        finally:
            text, self._collected = "".join(self._collected), None
            if not fits(text):
                self._stdout.flush()
                shown = page(text, command, self._env)
            if not shown:
                self._print(text)

    @cached_property
    def _display(self) -> Display:
        return Display.of(self._options, self._env)

    def end_pieces(self) -> None:
        """The end of streamed text: the rest of it, and a newline unless it has one; then what was
        to be said meanwhile."""
        if self._pieces is None:
            return
        self._write_piece(self._pieces.finish())
        self._pieces = None
        if not self._at_line_start:
            self._write_piece("\n")
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            self._say(text)

    def _write_piece(self, text: str) -> None:
        if text:
            self._print(text)
            self._print("", flush=True)
            self._at_line_start = text.endswith("\n")

    # -- stderr ---------------------------------------------------------------------------------

    def note(self, text: str, *, level: int = 0) -> None:
        """What is going on. `level` 1 and 2 are said only with -v and -vv."""
        if self._silent() or self.verbose < level:
            return
        self._say(self._looks.styled(self._stderr, visible(text), "dim" if level else ""))

    def warn(self, message: str, hint: str = "") -> None:
        """Something the user should know about though the command goes on. Not with --quiet."""
        if self.json:
            self._say(_json_line({"warning": {"message": message, "hint": hint}}).rstrip("\n"))
        elif not self.quiet:
            self._say(self._labelled("warning:", "yellow", message, hint))

    def error(self, failure: Failure) -> None:
        """The one line a failure gets, JSON or not."""
        self.end_pieces()
        if self.json:
            self._say(_json_line({"error": failure.to_json()}).rstrip("\n"))
        else:
            self._say(self._labelled("error:", "red", failure.message, failure.hint))

    def progress(self, label: str, *, unit: str = "", total: int | None = None) -> Progress:
        """Progress of one piece of work, as a context manager; see `Progress`.

        Notes and warnings go above its bar meanwhile; data should wait for its end.
        """
        self._progress = Progress(
            one_line(label),
            unit=unit,
            total=total,
            stream=self._stderr,
            bar=self._display.progress == "auto" and self._looks.can_draw(self._stderr),
            lines=self._display.progress == "plain",
            json=self.json,
            silent=self.quiet or self._display.progress == "none",
            tell=self._live[0].told if self._live is not None else None,
        )
        return self._progress

    def live(self, scene: Scene) -> View:
        """Shows a scene while it goes on, as a context manager: on a terminal in a region of its
        own, elsewhere as lines; see `cbcli.live`. Progress meanwhile is told to the scene."""
        from cbcli.live.view import PlainView, View

        view = View() if self._silent() else PlainView(scene, self.note)
        if self._looks.can_draw(self._stderr) and not self._silent():
            from cbcli.inspect.theme import Look
            from cbcli.live.region import Region

            ascii = not (self._stderr.encoding or "utf-8").lower().startswith("utf")
            colour = self._looks.coloured(self._stderr)
            look = Look(dark=not self._looks.bright, color=colour, ascii=ascii)
            view = Region(scene, self._stderr, look)
        self._live = scene, view
        return view

    def _silent(self) -> bool:
        # In a pipeline that reads JSON nobody reads notes; at a terminal somebody may.
        return self.quiet or (self.json and not is_terminal(self._stderr))

    def _labelled(self, label: str, style: str, message: str, hint: str) -> str:
        text = f"{self._looks.styled(self._stderr, label, style)} {one_line(message)}"
        return f"{text} ({one_line(hint)})" if hint else text

    def _say(self, text: str) -> None:
        if self._progress is not None and self._progress.above(text):
            return
        if self._live is not None and self._live[1].above(text):
            return
        if self._pieces is not None:  # streamed text isn't broken up
            self._waiting.append(text)
            return
        self._stderr.write(text + "\n")
        self._stderr.flush()


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Within, standard output is written: an error of that names it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is not None:
            raise
        raise CacheblendError(
            f"standard output: {error.strerror or error}", "not all was printed"
        ) from error


def _widths(cells: list[list[str]]) -> list[int]:
    return [max(width(row[i]) for row in cells) for i in range(len(cells[0]))]


def _total(widths: list[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _without_alike(
    cells: list[list[str]], names: Collection[str]
) -> tuple[list[list[str]], list[str]]:
    """A table, its headers first, without those of the named columns that say the same in every
    row; and what they say. An empty cell says nothing else."""
    kept, said = [], []
    for place, header in enumerate(cells[0]):
        values = {row[place] for row in cells[1:]} - {""}
        if header in names and len(values) < 2:
            said += [f"{header} {value}" for value in values]
        else:
            kept.append(place)
    return [[row[place] for place in kept] for row in cells], said


def _fit(widths: list[int], columns: int) -> None:
    """Shorten the widest of `widths` in place until the table fits `columns`, if it can."""
    while _total(widths) > columns and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1


def _json_line(value: object) -> str:
    try:
        text = json_module.dumps(value, allow_nan=False)
    except ValueError:
        text = json_module.dumps(_finite(value), allow_nan=False)
    return text + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
