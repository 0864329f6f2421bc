"""`cacheblend store import`: what `store export` wrote, into the store."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import NotFoundError, UsageError
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.errors import Interrupted
from cbcli.output import Output
from cbcli.settings import load_settings
from cbcli.store_listing import plural
from cbcli.units import duration_text, size_text

if TYPE_CHECKING:
    from cache_store.archive import Stream
    from cache_store.importing import Conflict

EXAMPLES = examples(
    "cacheblend store import notes.tar",
    "ssh other cacheblend store export - | cacheblend store import -",
)


@flags.with_settings("store", "limit", "progress")
def import_archive(
    file: Annotated[str, typer.Argument(help="The archive; - for standard input.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the archive's version of a document.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the store's version of a document.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Take the documents and KV of an archive into the store.

    A store is made where there is none.
    All names and sizes are checked before anything is unpacked, and every chunk before it is
    stored. What is there already is passed over, so that the same command goes on after an
    interrupt. Stored KV decides what is answered: take archives only from those you trust."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    if replace and keep:
        raise UsageError("--replace and --keep exclude each other", "give one of them")
    conflict: Conflict = "replace" if replace else "keep" if keep else "refuse"
    settings = load_settings(options)
    from cache_store.archive import ArchiveReader
    from cache_store.importing import Import, ImportReport

    began, report = time.monotonic(), ImportReport()
    with ExitStack() as stack:
        stream = _opened(stack, file)
        progress = stack.enter_context(out.progress("reading", unit="bytes"))
        total: int | None = None

        def on_bytes(done: int) -> None:
            progress.update(done, total=total)

        reader = ArchiveReader(stream, on_bytes)  # before a store is made for nothing
        total = reader.manifest.total
        new = not settings.store.exists()
        store = stack.enter_context(ChunkStore.open(settings.store, limit_bytes=settings.limit))
        try:
            work = Import(store, reader, conflict=conflict)
            report = work.report
            work.run()
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {plural(report.entries, 'entry', 'entries')} and "
                f"{plural(report.documents, 'document', 'documents')} taken in",
                "run the same command again to go on from there",
            ) from error
    if json:
        out.data(
            {
                "store": str(settings.store),
                "new": new,
                "documents": report.documents,
                "documents_kept": report.kept_documents,
                "documents_replaced": report.replaced_documents,
                "entries": report.entries,
                "entries_kept": report.kept_entries,
                "bytes": report.entry_bytes,
            }
        )
    elif not quiet:
        kept = (
            f"; {plural(report.kept_documents, 'document', 'documents')} and "
            f"{plural(report.kept_entries, 'entry', 'entries')} were there already"
            if report.kept_documents or report.kept_entries
            else ""
        )
        out.line(
            f"{plural(report.documents, 'document', 'documents')} and "
            f"{plural(report.entries, 'entry', 'entries')} taken in, "
            f"{size_text(report.entry_bytes)}, in {duration_text(time.monotonic() - began)}{kept}"
        )


def _opened(stack: ExitStack, file: str) -> Stream:
    """What the archive is read from."""
    if file == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no archive was given", "name a file, or pipe one into it")
        return sys.stdin.buffer
    path = Path(file)
    if not path.exists():
        raise NotFoundError(f"there is no file {path}", "cacheblend store export writes one")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", "give an archive of store export")
    return stack.enter_context(path.open("rb"))
