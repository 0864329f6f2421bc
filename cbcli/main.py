"""The `cacheblend` command: a table of commands, each imported only when it runs.

To add a command, write its module as `cbcli/command.py` describes and add a line to `COMMANDS`.
`cacheblend --help` reads the table alone, which is why it needs no module of any command.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cbcli.command import Group, app_options, examples
from cbcli.variables import name_variables

# name: (module with an `app`, one line of help)
COMMANDS = {
    "ingest": ("cbcli.commands.ingest", "Read documents, cut them into chunks, store their KV."),
    "ask": ("cbcli.commands.ask", "Answer a question over the stored chunks."),
    "search": ("cbcli.commands.search", "Find the stored chunks that fit a question."),
    "chat": ("cbcli.commands.chat", "Talk over the stored chunks; what was said is kept."),
    "run": ("cbcli.commands.run", "Answer many prompts, one a line, with one model load."),
    "serve": ("cbcli.commands.serve", "Serve a model with vLLM, over the stored chunks."),
    "inspect": ("cbcli.commands.inspect", "Look at a run: tokens, layers, time; compare runs."),
    "store": ("cbcli.commands.store", "Look at and tidy the store of chunks."),
    "bench": ("cbcli.commands.bench", "Measure how fast this machine is with a model."),
    "eval": ("cbcli.commands.eval", "Measure how close answers stay to a full prefill's."),
    "calibrate": (
        "cbcli.commands.calibrate",
        "Check that a model can be blended, and find its policy and ratio.",
    ),
    "models": ("cbcli.commands.models", "Get, list, check and remove models."),
    "config": ("cbcli.commands.config", "Settings, and where each of them comes from."),
    "doctor": ("cbcli.commands.doctor", "Check what works on this machine, and how fast."),
}

AGAIN_SECONDS = 0.01  # until an interrupt that was lost comes again


class Commands(Group):
    """The root group: commands come from the table, in its order."""

    _named_only = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The names of the table: none of their modules is needed for that."""
        self._named_only = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._named_only = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._named_only:
            return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name][1])
        return app_command(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def app_command(name: str) -> Any:
    """The command of this name in the table. Imports its module."""
    return _command(import_module(COMMANDS[name][0]).app, name)


@cache
def _command(app: typer.Typer, name: str) -> Any:
    """The command, made once: it is asked for twice on the way to being run."""
    command = typer.main.get_command(app)
    command.name = name
    name_variables(command, (name,))
    return command


app = typer.Typer(
    cls=Commands,
    **app_options(completion=True),
    epilog=examples(
        "cacheblend ingest notes/", "cacheblend ask 'When is the next planning meeting?'"
    ),
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"cacheblend {metadata.version('cacheblend')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Answer questions over your documents sooner: the KV cache of every chunk is kept, joined in
    any order, and only the tokens that matter are computed again."""


def _unraisable(ignored: Any) -> None:
    """What Python does with an exception it cannot raise, as in a finalizer: it tells of it and
    goes on. Ctrl-C must not be lost so: it comes again a moment later, outside of there."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        _send_again(signal.SIGINT)
    elif not issubclass(ignored.exc_type, _Leaving):  # that comes again by itself
        sys.__unraisablehook__(ignored)


def _send_again(number: int) -> None:
    """A real signal, to the main thread, so that it ends what that may be waiting in."""
    there = (threading.main_thread().ident, number)
    again = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, there)
    again.daemon = True
    again.start()


class _Leaving(SystemExit):
    """On its way to the top. Where something swallows it, as a finalizer or an `except` around an
    import does, it is gone before it gets there, and the signal comes again."""

    under_way = False

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._number = number
        _Leaving.under_way = True

    def __del__(self) -> None:
        if _Leaving.under_way:
            _Leaving.under_way = False
            _send_again(self._number)


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the command in good order, as Ctrl-C does: workers go, temporary files too."""
    if not _Leaving.under_way:
        raise _Leaving(number)


def main() -> None:
    """The entry point; it exits with the codes of `cbcli.errors`."""
    sys.unraisablehook = _unraisable
    ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    # Importing torch and reading a tokenizer make a million objects that stay. Looking for garbage
    # among them at the usual rhythm, every 700, would take a tenth of the time to the first token.
    gc.set_threshold(50_000)
    if sys.stdout is None:  # closed by the caller, as with >&-
        from cbcli.closed import ClosedStream

        sys.stdout = ClosedStream()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        app()
    finally:  # in Python's own end there are callbacks that would swallow it
        if ours:
            after = signal.SIG_IGN if _Leaving.under_way else signal.SIG_DFL
            signal.signal(signal.SIGTERM, after)
        _Leaving.under_way = False
