"""What every command module is made of.

A module in `cbcli/commands/` has one `app` and is named once in the table of `cbcli/main.py`, which
imports it only when its command runs. Nothing heavy is imported at its top: torch, tokenizers,
`engine` modules that need them and the like come inside the function that uses them.

    app = typer.Typer(**app_options())             # with cls=Group for a group, as `models` is

    @app.command(epilog=examples("cacheblend ask 'What is due in May?'"))
    @flags.with_settings(flags.RETRIEVAL, flags.BLEND, "live", flags.STORE, flags.MODEL)
    def ask(
        question: ...,                              # the command's own arguments and flags
        options: flags.Options = flags.NONE,        # here come the flags of the settings
        json: Json = False,
        quiet: Quiet = False,
        verbose: Verbose = 0,
    ) -> None:
        \"\"\"Answer a question over the documents in the store.\"\"\"
        out = Output(json=json, quiet=quiet, verbose=verbose)
        settings = load_settings(options)

Flags that are settings are not written out: `with_settings` names their groups, or a setting by
itself, and `without=("loader",)` leaves some out. Their help is what `cbcli.declared` says of the
setting; a new field there with `group=RETRIEVAL` is a flag of every command with that group.
`options.get("policy")` is what was given as a flag, None where it wasn't; a command that decides
one by itself puts it on top: `load_settings({**options, "model": model})`.

Failures are raised as classes of `cache_store.errors` and end up in `cbcli.errors`; a command that
did only part of its work says so and raises
`typer.Exit(ExitCode.FAILED)`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cache_store.errors import UsageError
from cbcli import errors
from cbcli.errors import ExitCode
from cbcli.output import Output, to_stdout
from cbcli.text import visible

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; errors as JSON too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print data and errors only.")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Say more; twice adds tracebacks."
    ),
]


def app_options(*, completion: bool = False) -> dict[str, Any]:
    """What every `typer.Typer` here is made with: plain help, and failures left to `Group`."""
    return {
        "add_completion": completion,
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }


def examples(*lines: str) -> str:
    """The example part of a command's help: one command a line, kept as it is."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def nearest(word: str, known: Sequence[str]) -> str:
    """The one of `known` that is most like `word`, or "" where none is like it."""
    return next(iter(get_close_matches(word, known, n=1, cutoff=0.5)), "")


# What other programs call a command, and what it is called here, where there is such a one.
OTHER_NAMES = {
    "help": ("--help",),
    "version": ("--version",),
    "list": ("ls",),
    "get": ("pull", "show"),
    "set": ("init",),
    "download": ("pull",),
    "install": ("pull",),
    "delete": ("rm",),
    "info": ("show", "stats"),
    "du": ("stats",),
    "gc": ("prune",),
    "clean": ("prune",),
    "add": ("ingest",),
    "index": ("ingest",),
    "query": ("ask",),
    "find": ("search",),
}


def _meant(word: str, commands: Sequence[str]) -> str:
    """The command that may have been meant, "" where none is like it."""
    for name in OTHER_NAMES.get(word, ()):
        if name in commands or name.startswith("--"):
            return name
    return nearest(word, commands)


class Group(TyperGroup):
    """A group of commands that names the nearest one to a wrong one, and where all failures end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(self.get_help(ctx), err=True)
            raise typer.Exit(ExitCode.USAGE)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """What each command does, in a whole sentence: it is wrapped, not cut."""
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command and command.help and not command.short_help:
                first = " ".join(command.help.split("\n\n")[0].split())
                command.short_help = first.split(". ")[0].removesuffix(".") + "."
        super().format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            path = ctx.command_path
            near = _meant(name, self.list_commands(ctx))
            advice = f"did you mean '{path} {near}'? " if near else ""
            raise UsageError(f"no such command: '{path} {name}'", f"{advice}see {path} --help")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **named: Any) -> NoReturn:
        """Run, and exit with the code that fits what happened. See `cbcli.errors`."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a character it can't hold is spelt out
                stream.reconfigure(errors="backslashreplace")
        given = list(sys.argv[1:] if args is None else args)
        wanted = errors.Wanted.of(given)
        try:
            named |= {"prog_name": "cacheblend", "standalone_mode": False}
            result = super().main(given, *rest, **named)
            with to_stdout():
                sys.stdout.flush()
        except (BrokenPipeError, errors.PipeClosed):
            _stop_writing()
            sys.exit(ExitCode.PIPE_CLOSED)
        except (Exception, KeyboardInterrupt) as error:  # the one place where all of them end
            out = Output(json=wanted.json)
            if wanted.debug and not isinstance(error, KeyboardInterrupt):
                sys.stderr.write(visible(errors.traceback_text(error)))
            failure = errors.describe(error)
            with contextlib.suppress(BrokenPipeError):
                out.error(failure)
            sys.exit(failure.code)
        sys.exit(result if isinstance(result, int) else 0)

    # Typer would turn an interrupt, or a reader that went away, into an exit of its own, in these
    # two and nowhere else.

    def make_context(self, *args: Any, **named: Any) -> Any:
        try:
            return super().make_context(*args, **named)
        except KeyboardInterrupt as error:
            raise errors.Interrupted("interrupted") from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise errors.Interrupted("interrupted") from error
        except BrokenPipeError as error:
            raise errors.PipeClosed from error


def _stop_writing() -> None:
    """Point stdout nowhere, so that flushing it at exit doesn't complain about the closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout has no descriptor
        sys.stdout = None
