"""Which files a command reads: paths, a list of files, and the settings that choose among them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import CacheblendError, NotFoundError, UsageError

if TYPE_CHECKING:
    from cbcli.output import Output
    from cbcli.settings import Settings
    from engine.documents import Document, FileChoice, Found, Skipped, Unreadable

FilesFrom = Annotated[
    str | None,
    typer.Option(
        "--files-from", metavar="FILE", help="Read the files that FILE lists, a line each; - stdin."
    ),
]
Null = Annotated[
    bool, typer.Option("--null", "-0", help="In --files-from, names end with a NUL character.")
]

_MOST_LISTED = 64 * 2**20


def chosen_files(
    settings: Settings,
    paths: Sequence[str],
    *,
    files_from: str | None = None,
    null: bool = False,
    stdin_name: str = "stdin",
) -> Iterator[Found]:
    """The files to read, found as they are asked for.

    Raises UsageError for a choice that cannot be, NotFoundError for a typed path or a list that
    isn't there.
    """
    from engine.documents import find_files

    if files_from == "-" and "-" in paths:
        raise UsageError("standard input can't be a list of files and a document", "give one")
    if null and files_from is None:
        raise UsageError("--null is for --files-from", "give both")
    choice = file_choice(settings)
    listed = _listed(files_from, null=null) if files_from is not None else []
    return find_files(paths, stdin_name=stdin_name, choice=choice, listed=listed)


def file_choice(settings: Settings) -> FileChoice:
    """What the settings say of files in folders. Raises UsageError."""
    from engine.documents import FileChoice

    return FileChoice(
        ignore=settings.unrestricted < 1,
        hidden=settings.unrestricted >= 2,
        binary=settings.unrestricted >= 3,
        globs=settings.globs,
        types=settings.types,
        not_types=settings.not_types,
        follow=settings.follow,
        max_bytes=settings.max_size,
    )


def _listed(file: str, *, null: bool) -> list[str]:
    """The names in a list of files."""
    from engine.documents.finding import lines_of

    if file == "-":
        if sys.stdin is None:
            raise UsageError("--files-from - : standard input is closed", "give a file")
        raw = sys.stdin.buffer.read(_MOST_LISTED + 1)
    else:
        raw = _read_list(file)
    if len(raw) > _MOST_LISTED:
        most = _MOST_LISTED // 2**20
        raise UsageError(f"--files-from {file}: is larger than {most} MiB", "give a list of files")
    return lines_of(raw, null=null)


def _read_list(file: str) -> bytes:
    """No more of it than needed to tell that it is too large, as a device would be."""
    try:
        with Path(file).open("rb") as opened:
            return opened.read(_MOST_LISTED + 1)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise NotFoundError(f"--files-from {file}: no such file", "check its spelling") from None
    except OSError as error:
        raise CacheblendError(f"--files-from {file}: {error.strerror}", "give a file") from error


def read_all(
    out: Output, settings: Settings, found: Iterator[Found]
) -> Iterator[Document | Unreadable | Skipped]:
    """Reads the files one by one, with progress."""
    from engine.documents.parallel import read_in_parallel

    with out.progress("reading", unit="files") as progress:
        for number, item in enumerate(read_in_parallel(found, settings.jobs), 1):
            yield item
            progress.update(number)


def list_types(out: Output) -> None:
    """Shows the types of files there are."""
    from engine.documents.filetypes import file_types

    if out.json:
        out.data({"types": {name: list(names) for name, names in file_types().items()}})
        return
    out.table(["type", "files"], [(name, " ".join(n)) for name, n in file_types().items()])
