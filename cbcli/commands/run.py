"""`cacheblend run`: many prompts with one model load, one JSON line out for each line in."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cbcli import flags
from cbcli.calibrated import Calibrated
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import Interrupted
from cbcli.lines.order import LineSource, at_once, in_turn, shared
from cbcli.lines.output import OutputFile
from cbcli.lines.prompts import LineParser
from cbcli.lines.reader import ByteStream, LineReader
from cbcli.lines.runner import Answer, Asks, LineRunner, runner_on
from cbcli.output import Output
from cbcli.progress import Progress
from cbcli.session import check_engine, model_folder, open_blueprint
from cbcli.settings import Settings, load_settings
from cbcli.traces import check_folder
from cbcli.units import count_text, duration_text

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend run prompts.jsonl > answers.jsonl",
        "cacheblend run prompts.jsonl --output answers.jsonl --resume",
        "cacheblend run prompts.jsonl --devices cuda:0,cuda:1 --output answers.jsonl",
        "jq -c '{question: .}' questions.json | cacheblend run - | jq -r .answer",
    )
)
@flags.with_settings(
    flags.RETRIEVAL,
    flags.BLEND,
    flags.TRACE,
    "cite",
    flags.PROMPT,
    flags.SAMPLING,
    "text_separator",
    flags.STORE,
    "memory_limit",
    flags.MODEL,
    "devices",
    flags.ENGINE,
    "progress",
)
def run(
    file: Annotated[
        str, typer.Argument(help="Prompts, one JSON object a line; - for standard input.")
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the lines to this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what --output holds already.")
    ] = False,
    compare: flags.Compare = False,
    trace_dir: Annotated[
        Path | None,
        typer.Option("--trace-dir", help="Record each line's run in this folder, for inspect."),
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Answer many prompts with one model load.

    Each line is {"question": …}, {"question": …, "chunks": [text or {"id": …}, …]} or
    {"prompt": "instructions # # chunk # # question"}, with an "id" and its own "ratio",
    "max_tokens" and the like where wanted. Each gets one line of JSON, in the same order: what
    `ask --json` prints, or an error, which doesn't stop the others. Chunks that are new are
    stored, and reused in any order from then on.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    if options.get("devices") is not None and options.get("device") is not None:
        raise UsageError("--devices and --device exclude each other", "give one of them")
    if resume and output is None:
        raise UsageError("--resume goes on from a file", "name it with --output")
    settings = load_settings(options)
    check_engine(settings, "devices")
    if settings.policy == "explicit":
        raise UsageError("policy explicit takes the positions of one prompt", "use it with `ask`")
    if trace_dir is not None:
        check_folder(trace_dir)
    asks = Asks(compare, trace_dir)
    places = (
        settings.devices if options.get("device") is None and settings.engine == "torch" else ()
    )
    tally = _Tally(time.monotonic())
    with ExitStack() as stack:
        stream, total = _open(stack, file, output)
        target = None
        if output is not None:
            target = stack.enter_context(OutputFile(Path(output), resume=resume))
        parser = LineParser(settings, compare=compare)
        source = LineSource(LineReader(stream), parser, target)
        try:
            answers = _answers(stack, out, settings, source, places, asks)
            _write(out, answers, target, tally, total)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {tally.answered} lines answered",
                "the same command with --resume goes on from there"
                if target is not None
                else "with --output FILE, --resume can go on from there",
            ) from error
        if target is not None:
            tally.changed = target.changed
            target.finish()
    _report(out, tally, target is not None)


@dataclass
class _Tally:
    """Lines so far. kept: answered by an earlier run; changed: answered by one, but no longer the
    same."""

    began: float
    answered: int = 0
    kept: int = 0
    failed: int = 0
    changed: int = 0
    first_failure: str = ""

    @property
    def lines(self) -> int:
        return self.answered + self.kept + self.failed

    def count(self, answer: Answer) -> None:
        if answer.kept:
            self.kept += 1
        elif answer.failure:
            self.failed += 1
            self.first_failure = self.first_failure or f"line {answer.number}: {answer.failure}"
        else:
            self.answered += 1


def _open(stack: ExitStack, file: str, output: str | None) -> tuple[ByteStream, int | None]:
    """The input and, where that can be told, how many lines it has."""
    if file == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompts were given", "name a file, or pipe lines into it")
        return sys.stdin.buffer, None  # type: ignore[return-value]  # a BufferedReader
    path = Path(file)
    if not path.exists():
        raise NotFoundError(f"there is no file {path}", "give one with a JSON object a line")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "give a file with a JSON object a line")
    if output is not None and Path(output).exists() and path.samefile(output):
        raise UsageError(f"{path} is both input and output", "name another file with --output")
    total = None
    if path.is_file():
        with path.open("rb") as blocks:
            total = sum(block.count(b"\n") for block in iter(partial(blocks.read, 2**20), b""))
    return stack.enter_context(path.open("rb")), total


def _answers(
    stack: ExitStack,
    out: Output,
    settings: Settings,
    source: LineSource,
    places: tuple[str, ...],
    asks: Asks,
) -> Iterator[Answer]:
    """The answers, from this process or from one a device."""
    if len(places) < 2:
        on = replace(settings, device=places[0]) if places else settings
        runner = stack.enter_context(LineRunner(on, out, asks))
        if runner.together > 1:
            return at_once(source, runner, runner.together)
        return in_turn(source, runner)
    from engine.workers import WorkerPool

    model_folder(settings, out)  # got once, before several would get it
    if settings.dtype == "auto" and len({place.partition(":")[0] for place in places}) > 1:
        # One type for all kinds of devices, or their KV would not be the same.
        first = open_blueprint(replace(settings, device=places[0]), out)
        settings = replace(settings, dtype=first.dtype, kv_dtype=first.kv_dtype)
    _say_calibrations(out, settings, places)
    start = partial(runner_on, settings, asks, places.count("cpu"))
    pool = stack.enter_context(WorkerPool(places, start, out.warn))
    return shared(source, pool, len(places))


def _say_calibrations(out: Output, settings: Settings, places: tuple[str, ...]) -> None:
    """Says once what is wrong with them, which the workers are too quiet for. A gate that failed
    is each line's error, and a device that isn't there its worker's."""
    for place in {place.partition(":")[0]: place for place in places}.values():
        with suppress(CacheblendError):
            blueprint = open_blueprint(replace(settings, device=place), out)
            Calibrated.open(blueprint, out).require_gate(settings)


def _write(
    out: Output,
    answers: Iterator[Answer],
    target: OutputFile | None,
    tally: _Tally,
    total: int | None,
) -> None:
    """Writes every answer as soon as it is its turn."""
    with ExitStack() as stack:
        progress: Progress | None = None
        if target is not None or not sys.stdout.isatty():  # else the lines show how far it is
            label = "loading the model"
            progress = stack.enter_context(out.progress(label, unit="lines", total=total))
            progress.update(0)
        for answer in answers:
            if target is None:
                out.data(answer.record)
            else:
                target.write(answer.number, answer.kept or _json_line(answer.record))
            tally.count(answer)
            for note in answer.notes:
                out.warn(f"line {answer.number}: {note}")
            if answer.failure:
                out.note(f"line {answer.number}: {answer.failure}", level=1)
            if progress is not None and not answer.kept:
                if tally.answered + tally.failed == 1:  # rates count from here
                    progress.restart("answering")
                progress.update(tally.lines, total=total)


def _json_line(record: dict[str, Any]) -> str:
    """The record as `Output` writes it."""
    text = io.StringIO()
    Output(json=True, stdout=text).data(record)
    return text.getvalue()


def _report(out: Output, tally: _Tally, to_file: bool) -> None:
    seconds = time.monotonic() - tally.began
    if to_file and out.json:
        out.data(
            {
                "lines": tally.lines,
                "answered": tally.answered,
                "kept": tally.kept,
                "failed": tally.failed,
                "replaced": tally.changed,
                "seconds": seconds,
            }
        )
    if tally.changed:
        out.note(
            f"{count_text(tally.changed, 'lines')} had changed, or the settings had: answered anew"
        )
    kept = f", {tally.kept:,} kept from an earlier run" if tally.kept else ""
    out.note(
        f"{count_text(tally.lines, 'lines')}: {tally.answered:,} answered{kept}, "
        f"{tally.failed:,} failed, in {duration_text(seconds)}"
    )
    if tally.failed:
        raise CacheblendError(
            f"{tally.failed} of {count_text(tally.lines, 'lines')} failed; {tally.first_failure}",
            "the output line of each says why",
        )
