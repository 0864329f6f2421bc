"""`cacheblend store export`: documents and their KV into one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.errors import ExitCode, Interrupted
from cbcli.output import Output, to_stdout
from cbcli.store_access import store_settings
from cbcli.store_choice import chosen_models, chosen_sources
from cbcli.store_listing import plural
from cbcli.text import one_line
from cbcli.units import duration_text, size_text

EXAMPLES = examples(
    "cacheblend store export notes.tar --document notes/plan.md",
    "cacheblend store export - | ssh other cacheblend store import -",
)


@flags.with_settings("store", "progress")
def export(
    file: Annotated[
        str, typer.Argument(help="The archive to write; - for standard output.")
    ] = "cacheblend.tar",
    document: Annotated[
        list[str] | None,
        flags.documents_option("Only this document; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Only KV of this model: its name, or its fingerprint."),
    ] = None,
    collection: flags.Collection = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Write documents and their KV into one archive, for `store import`.

    The archive is a plain tar file. It is written as FILE.part and named FILE once it is whole;
    after an interrupt the same command checks what is there and goes on. It holds the documents'
    text. What is damaged is left out and named, with exit code 4; what only prompts saved is not
    in it."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    path = None if file == "-" else Path(file)
    where = store_settings(options).store
    _check(path, where, out, force)
    from cache_store.exporting import Exported, export_file, export_to, plan_export

    began = time.monotonic()
    ChunkStore.open(where, read_only=True).close()
    with ChunkStore.open(where) as store:
        sources = chosen_sources(store, document, collection)
        models = chosen_models(store, model)
        with out.progress("checking", unit="bytes") as progress:
            plan = plan_export(store, sources, models, progress.update)
        for line in plan.damaged:
            out.warn(line, "left out; see cacheblend store verify")
        written = 0
        try:
            with out.progress("writing", unit="bytes", total=plan.total) as progress:

                def on_bytes(done: int) -> None:
                    nonlocal written
                    progress.update(written := done)

                if path is None:
                    with to_stdout():
                        export_to(store, plan, sys.stdout.buffer, on_bytes)
                        sys.stdout.buffer.flush()
                    done = Exported(written, 0)
                else:
                    done = export_file(store, plan, path, on_bytes)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {size_text(written)} of {size_text(plan.total)} written",
                "run the same command again to go on from there"
                if path is not None
                else "what was written is no whole archive; write to a file to go on after this",
            ) from error
    documents, entries = len(plan.manifest.documents), plan.entries
    if json:
        out.data(
            {
                "file": str(path),
                "documents": documents,
                "entries": entries,
                "bytes": done.nbytes,
                "bytes_kept": done.kept,
                "damaged": list(plan.damaged),
            }
        )
        _leave(plan.damaged)
        return
    kept = f", {size_text(done.kept)} of it from an earlier run" if done.kept else ""
    line = (
        f"{plural(documents, 'document', 'documents')} and {plural(entries, 'entry', 'entries')}: "
        f"{size_text(done.nbytes)}{kept}, in {duration_text(time.monotonic() - began)}"
    )
    if path is None:
        out.note(line)
    elif not quiet:
        out.line(f"{one_line(str(path))}: {line}")
    _leave(plan.damaged)


def _leave(damaged: Sequence[str]) -> None:
    """Exit 4 where something was left out."""
    if damaged:
        raise typer.Exit(ExitCode.INTEGRITY)


def _check(path: Path | None, store: Path, out: Output, force: bool) -> None:
    """Raises UsageError for a file that can't be written, before any work."""
    if path is None:
        if out.json:
            raise UsageError("--json and - both want standard output", "name a file")
        if sys.stdout.isatty():
            raise UsageError("an archive is nothing for a terminal", "name a file, or pipe it")
        return
    from cache_store.exporting import export_target

    if export_target(path, store).exists() and not force:
        raise UsageError(f"{path} is there already", "--force replaces it")
