"""`cacheblend inspect`: which tokens of a run were recomputed, why, and where the time went."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cache_store.errors import NotFoundError, UsageError
from cbcli import completion, flags
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.output import Output
from cbcli.settings import load_settings
from cbcli.traces import traces_root

if TYPE_CHECKING:
    from cbcli.inspect.runner import Runner, Wish
    from engine.trace.record import Trace

app = typer.Typer(**app_options())

FORMATS = ("text", "json", "csv", "html", "svg", "png")
STDOUT = Path("-")
VIEWS = ("tokens", "layers", "time", "compare")
ASKING = ("knobs", "chunks")  # there is nothing to print of them


@app.command(
    epilog=examples(
        "cacheblend inspect",
        "cacheblend inspect run.cbtrace",
        "cacheblend inspect 'Who signs off?' --chunk 3f9a1c --chunk 77b0e2",
        "cacheblend inspect --last 2 --view compare",
        "cacheblend inspect run.cbtrace --format html --out run.html",
        "cacheblend inspect --format svg --view time --size 120x40 > time.svg",
    )
)
@flags.with_settings("collections", "model", "store")
def inspect(
    trace: Annotated[
        list[str] | None,
        typer.Argument(
            autocompletion=completion.traces,
            help="Files of `ask --trace`; none: the last run. Or a question to ask.",
        ),
    ] = None,
    chunk: Annotated[
        list[str] | None,
        flags.chunks_option("Of a question: a chunk's id; repeat, in order."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="The last so many runs instead.")
    ] = None,
    view: Annotated[
        str, typer.Option("--view", help="tokens, layers, time, compare, knobs or chunks.")
    ] = "tokens",
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", help="text, json, csv, html, svg or png, and no view."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write that to; -: stdout.")
    ] = None,
    size: Annotated[
        str, typer.Option("--size", help="Columns and lines of an svg.", metavar="COLSxLINES")
    ] = "120x40",
    at: Annotated[
        int | None, typer.Option("--at", min=0, help="The position to begin at; see Tokens.")
    ] = None,
    light: Annotated[bool, typer.Option("--light", help="Dark text on a light ground.")] = False,
    ascii: Annotated[bool, typer.Option("--ascii", help="ASCII alone, whatever is shown.")] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Look at a run: its tokens, layers and time, beside other runs.

    `ask --trace FILE` writes a trace, and the last few runs are kept by themselves. Without a
    terminal, or with --format, the same is printed: text is a summary, json has every number, csv
    the table of --view, svg the screen, png plots of layers and time.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose)
    wanted = wanted_format(format, json, out_file)
    views = VIEWS if wanted else (*VIEWS, *ASKING)
    if view not in views:
        where = " without a terminal" if view in ASKING else ""
        raise UsageError(f"--view {view} is none{where}", f"one of {', '.join(views)}")
    columns, lines = parse_size(size)
    check_out(out_file, [Path(name) for name in trace or []])
    wish = asked(trace or [], chunk or [], last)
    if wanted is None:
        gc.disable()  # until the first screen, sooner by a tenth: nothing made till then is garbage
    if wish is not None:
        from cbcli.inspect.wishes import wish_as_set

        wish = wish_as_set(wish.question, wish.chunks, load_settings(options))
    traces = [] if wish else load_traces([Path(name) for name in trace or []], last)
    if wanted is None:
        _view(traces, wish, options, view=view, at=at, dark=not light, ascii=ascii)
    if wish is not None:
        from cbcli.inspect.engine_runner import EngineRunner

        traces = [EngineRunner(options).run(wish, lambda said: out.note(said, level=1))]
    looks = {"dark": not light, "ascii": ascii}
    data = render(wanted, traces, view, (columns, lines), at=at, **looks)
    if out_file is not None and out_file != STDOUT:
        out_file.write_bytes(data)
        out.note(f"wrote {out_file}")
        return
    if wanted == "png" and sys.stdout.isatty():
        raise UsageError("a png is nothing for a terminal", "name a file: --out run.png")
    _write(data)


def check_out(file: Path | None, traces: Sequence[Path]) -> None:
    """Raises UsageError for a file that cannot be written, before anything is computed for it, and
    for one of the traces themselves."""
    if file is None or file == STDOUT:
        return
    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
        raise UsageError(f"--out: {file} is no file to write", "name another file")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no folder {file.parent}", "make it first")
    if file.exists() and any(trace.exists() and file.samefile(trace) for trace in traces):
        raise UsageError(f"--out: {file} is the trace itself", "name another file")


def asked(names: Sequence[str], chunks: Sequence[str], last: int | None) -> Wish | None:
    """The question, where there is one and no file: with --chunk, or of several words. Raises
    UsageError."""
    several = len(names) == 1 and len(names[0].split()) > 1 and not _is_file(names[0])
    if not chunks and not several:
        return None
    if len(names) != 1 or last is not None:
        raise UsageError("--chunk is for one question", "put the question between quotes")
    from cbcli.inspect.runner import Wish

    return Wish(names[0], tuple(chunks))


def _is_file(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # longer than a name may be
        return False


def _view(
    traces: Sequence[Trace],
    wish: Wish | None,
    options: flags.Options,
    *,
    view: str,
    at: int | None,
    dark: bool,
    ascii: bool,
) -> NoReturn:
    """Shows the application until it is left, and ends the process."""
    from cbcli.inspect.app import InspectApp
    from cbcli.inspect.session import Session

    def runner() -> Runner:
        from cbcli.inspect.engine_runner import EngineRunner

        return EngineRunner(options)

    session = Session(runner, load_settings(options).context)
    app = InspectApp(
        traces,
        view=view,
        at=at,
        dark=dark,
        ascii=ascii,
        session=session,
        wish=wish,
    )
    try:
        app.run()
    except SystemExit as done:  # a signal: whoever ends the process waits for no run either
        session.leave(done.code if isinstance(done.code, int) else 1)
    session.leave(app.return_code or 0)


def parse_size(text: str) -> tuple[int, int]:
    """Columns and lines from "120x40". Raises UsageError."""
    first, cross, second = text.lower().partition("x")
    good = bool(cross) and first.isascii() and first.isdecimal() and second.isascii()
    if not good or not second.isdecimal():
        raise UsageError(f"--size {text} is no size", "write columns and lines: 120x40")
    columns, lines = int(first), int(second)
    if not (40 <= columns <= 1000 and 10 <= lines <= 1000):
        raise UsageError(f"--size {text} is out of range", "from 40x10 to 1000x1000")
    return columns, lines


def load_traces(files: Sequence[Path], last: int | None) -> list[Trace]:
    """The traces of files, or the last ones kept, the newest first.

    Raises NotFoundError where there are none, IntegrityError for damaged, foreign and newer ones.
    """
    from engine.trace.file import read
    from engine.trace.kept import kept

    if files and last is not None:
        raise UsageError("--last and files exclude each other", "give one of them")
    if files:
        return [read(path) for path in files]
    found = kept(traces_root())[: last or 1]
    if not found:
        raise NotFoundError(
            f"no run was kept in {traces_root()}",
            "ask something first, or name a file of `cacheblend ask --trace FILE`",
        )
    return [read(path) for path in found]


def wanted_format(format: str | None, json: bool, out_file: Path | None) -> str | None:
    """What to print; None: the view, on a terminal. Raises UsageError."""
    if json and format not in (None, "json"):
        raise UsageError(f"--json and --format {format} exclude each other", "give one of them")
    wanted = "json" if json else format.lower() if format else format
    if wanted is None and out_file == STDOUT:
        return "text"
    if wanted is None and out_file is not None:
        suffix = out_file.suffix.lower().lstrip(".")
        wanted = {"txt": "text", "htm": "html", "": "text"}.get(suffix, suffix)
    if wanted is None:
        # Textual draws on standard error.
        terminal = all(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr) if s is not None)
        return None if terminal else "text"
    if wanted not in FORMATS:
        raise UsageError(f"--format {wanted} is none", f"one of {', '.join(FORMATS)}")
    if wanted == "png" and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--format png needs matplotlib", "pip install 'cacheblend[plot]'")
    return wanted


def render(
    wanted: str,
    traces: Sequence[Trace],
    view: str,
    size: tuple[int, int],
    *,
    at: int | None = None,
    dark: bool = True,
    ascii: bool = False,
) -> bytes:
    """The traces in a format. Of several a png has the first, a csv too."""
    from cbcli.inspect.reuse import known_runs
    from cbcli.inspect.run import Run

    runs = [Run(trace, lambda: known_runs(traces)) for trace in traces]
    if wanted == "svg":
        from cbcli.inspect.picture import screen

        return screen(traces, view, size, at=at, dark=dark, ascii=ascii).encode()
    if wanted == "png":
        from cbcli.inspect.picture import plot

        return plot(runs[0])
    if wanted == "html":
        from cbcli.inspect.html import pages

        return pages(runs).encode()
    if wanted in ("csv", "json"):
        from cbcli.inspect.tables import csv_text, json_text, rows_of

        text = csv_text(rows_of(view, runs[0])) if wanted == "csv" else json_text(runs)
        return text.encode()
    from cbcli.inspect.lines import in_ascii, text_of
    from cbcli.inspect.summary import pair_lines, summary_lines
    from cbcli.inspect.theme import Look

    look = Look(color=False, ascii=ascii)
    shown = []
    for number, run in enumerate(runs):
        shown += [*([()] if number else []), *summary_lines(run, look)]
    for other in runs[1:]:
        shown += [(), *pair_lines(runs[0], other, look)]
    text = "\n".join(text_of(one).rstrip() for one in shown) + "\n"
    return (in_ascii(text) if ascii else text).encode()


def _write(data: bytes) -> None:
    """On stdout as it is."""
    sys.stdout.flush()
    raw = getattr(sys.stdout, "buffer", None)
    if raw is None:
        sys.stdout.write(data.decode())
    else:
        raw.write(data)
        raw.flush()
