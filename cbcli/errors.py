"""Every way a command can fail, as one line on stderr and an exit code of `ExitCode`.

Commands raise the classes of `cache_store.errors`; nothing else needs handling in
a command, for `cbcli.command.Group` brings all of it here.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import IntEnum
from pathlib import Path

import typer

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from cbcli.variables import wants_json


class ExitCode(IntEnum):
    """All that a command can exit with. Above 128 it is 128 + the number of the signal."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    INTEGRITY = 4
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    TERMINATED = 143


EXIT_MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed, in part or as a whole",
    ExitCode.USAGE: "a flag, an argument or a setting is wrong, or something does not fit",
    ExitCode.NOT_FOUND: "a model, chunk, document, collection or file is not there",
    ExitCode.INTEGRITY: "an integrity check failed: something stored is damaged",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
    ExitCode.PIPE_CLOSED: "whoever read standard output stopped reading, as `head` does",
    ExitCode.TERMINATED: "ended by SIGTERM",
}


class Interrupted(CacheblendError):
    """Ctrl-C."""

    kind = "interrupted"


class PipeClosed(Exception):
    """Whoever read standard output has stopped: nothing is left to do, and nothing to say."""


EXIT_CODES: tuple[tuple[type[CacheblendError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (NotFoundError, ExitCode.NOT_FOUND),
    (IntegrityError, ExitCode.INTEGRITY),
    (Interrupted, ExitCode.INTERRUPTED),
)

_OS_ADVICE = {
    errno.ENOSPC: "free some disk space, or point the setting `store` or `models_dir` elsewhere",
    errno.EDQUOT: "free some disk space, or point the setting `store` or `models_dir` elsewhere",
    errno.EACCES: "check the owner and permissions of that path",
    errno.EPERM: "check the owner and permissions of that path",
    errno.EROFS: "point the setting `store` or `models_dir` to a place that can be written",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


# A flag's value that is no number, as typer says it, and as settings do.
_NO_NUMBER = re.compile(r"Input should be a valid (number|integer), unable to parse .*")
_NUMBERS = {"number": "a number", "integer": "a whole number"}


@dataclass(frozen=True)
class Failure:
    """What the user is told. `kind` is a stable word; `code` the exit code."""

    kind: str
    message: str
    hint: str
    code: int

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


@dataclass(frozen=True)
class Wanted:
    """How the command line asks for errors, known even when the line itself can't be parsed."""

    json: bool = False
    debug: bool = False

    @classmethod
    def of(cls, args: Sequence[str], env: Mapping[str, str] = os.environ) -> Wanted:
        """Read from the raw arguments, up to a `--`."""
        options = list(args[: args.index("--")]) if "--" in args else list(args)
        verbose = options.count("--verbose") + sum(
            option.count("v")
            for option in options
            if option[:1] == "-" and set(option[1:]) in ({"v"}, {"v", "q"})
        )
        return cls(
            "--json" in options or wants_json(args, env) or "--jsonl" in options,
            verbose >= 2 or env.get("CACHEBLEND_DEBUG", "") not in ("", "0"),
        )


def describe(error: BaseException) -> Failure:
    """What to say about `error`; an error nobody foresaw is called a bug, with its place."""
    if isinstance(error, CacheblendError):
        code = next((code for kind, code in EXIT_CODES if isinstance(error, kind)), ExitCode.FAILED)
        return Failure(error.kind, error.message, error.hint, code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return describe(Interrupted("interrupted"))
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if _out_of_memory(error):
        return Failure(
            "failed",
            "out of memory",
            "use fewer or shorter chunks (--top-k), a smaller model, or another --device",
            ExitCode.FAILED,
        )
    if isinstance(error, ModuleNotFoundError) and _not_ours(error.name):
        return Failure(
            "failed",
            f"the Python package {(error.name or '').partition('.')[0]} is not installed",
            "what cacheblend needs may have changed: install it again, in its folder with "
            "pip install -e .",
            ExitCode.FAILED,
        )
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
        return Failure(
            "failed",
            f"{where}: {what}" if where else what,
            _OS_ADVICE.get(error.errno or 0, ""),
            ExitCode.FAILED,
        )
    return Failure(
        "internal",
        f"{type(error).__name__} in {_place(error)}: {error}",
        "this is a bug in cacheblend; CACHEBLEND_DEBUG=1 shows where it happened",
        ExitCode.FAILED,
    )


def traceback_text(error: BaseException) -> str:
    """The traceback, for those who asked for it with -vv or CACHEBLEND_DEBUG=1."""
    return "".join(traceback.format_exception(error))


def _usage(error: typer.TyperException) -> Failure:
    message = " ".join(error.format_message().split()).rstrip(".")
    message = _NO_NUMBER.sub(lambda found: f"expected {_NUMBERS[found[1]]}", message)
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "") or "cacheblend"
    possible = getattr(error, "possibilities", None)
    hint = f"see {path} --help"
    if getattr(context, "info_name", "") in ("ask", "search") and "extra argument" in message:
        hint = f"put a question of several words in quotes; {hint}"
    variable = getattr(getattr(error, "param", None), "envvar", None)
    if variable and variable in os.environ:  # which may be where it came from
        hint = f"{variable} is set; {hint}"
    if possible:
        message = error.message.rstrip(".")
        hint = f"did you mean {' or '.join(_nearest_first(error, possible)[:3])}? {hint}"
    option = str(getattr(error, "option_name", None) or "-")
    params = getattr(getattr(context, "command", None), "params", ())
    if option == "--document" and any(param.name == "sources" for param in params):
        hint = f"documents are named without a flag: {path} notes/plan.md"
    files = [a for a in sys.argv[1:] if option != "-" and a.startswith(option) and Path(a).exists()]
    if files:
        hint = f"for the file of this name: {path} -- {files[0]}"
    # Messages begin in lower case, as all of ours do; one that begins with a name keeps it.
    if message[:1].isupper() and message[1:2].islower():
        message = message[0].lower() + message[1:]
    return Failure("usage", message, hint, error.exit_code)


def _nearest_first(error: typer.TyperException, possible: Sequence[str]) -> list[str]:
    """Flags that may have been meant, without those that are much less like it than the best."""
    given = str(getattr(error, "option_name", "")).lstrip("-")
    like = {name: SequenceMatcher(None, given, name.lstrip("-")).ratio() for name in possible}
    best = max(like.values())
    return sorted((name for name in like if like[name] > best - 0.15), key=lambda n: (-like[n], n))


def _not_ours(module: str | None) -> bool:
    """Whether a module is of another package: one of ours that is missing is a bug."""
    return module is not None and module.partition(".")[0] not in ("cache_store", "cbcli", "engine")


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")  # never imported for this alone
    if torch is None:
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def _place(error: BaseException) -> str:
    """The innermost frame that is ours, as `engine/blend.py:120`."""
    ours = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(ours) and "site-packages" not in path.relative_to(ours).parts:
            return f"{path.relative_to(ours).as_posix()}:{frame.lineno}"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
