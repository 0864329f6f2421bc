"""`cacheblend ingest`: documents into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_store.errors import UsageError
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import ExitCode
from cbcli.fields import CUT_CHUNKS
from cbcli.file_choice import FilesFrom, Null, chosen_files, list_types, read_all
from cbcli.ingest_report import (
    behind,
    context_record,
    name_skipped,
    skipped_line,
    skipped_record,
    tell,
)
from cbcli.ingest_run import IngestRun
from cbcli.ingest_watch import check_watch
from cbcli.ingest_watch import watch as keep_current
from cbcli.listing import Fields, Jsonl, ListForm
from cbcli.output import Output
from cbcli.records import cut_record
from cbcli.session import (
    check_engine,
    open_blueprint,
    shown_source,
)
from cbcli.settings import Settings, load_settings
from cbcli.units import count_text, size_text

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.documents import Found, Skipped

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend ingest notes/ report.md",
        "cacheblend ingest --dry-run notes/ --type md -g '!drafts/'",
        "cacheblend ingest --watch notes/",
        "man -P cat ssh | cacheblend ingest - --stdin-name ssh.txt",
        "cacheblend ingest --devices cuda:0,cuda:1 library/",
    )
)
@flags.with_settings(
    flags.FILES,
    "collections",
    flags.CHUNKING,
    flags.PROMPT,
    "check",
    "live",
    flags.STORE,
    "limit",
    flags.MODEL,
    "devices",
    flags.ENGINE,
    "progress",
    "pager",
)
def ingest(
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, or - for standard input.", metavar="PATH…"),
    ] = None,
    files_from: FilesFrom = None,
    null: Null = False,
    type_list: Annotated[
        bool, typer.Option("--type-list", help="Show the types of files, and end.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Then go on, and ingest what changes, until interrupted."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the chunks and their size; store nothing.")
    ] = False,
    stdin_name: Annotated[
        str, typer.Option("--stdin-name", help="What to call the text on standard input.")
    ] = "stdin",
    options: flags.Options = flags.NONE,
    json: Json = False,
    jsonl: Jsonl = False,
    fields: Fields = None,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Read documents, cut them into chunks, compute each chunk's KV and store it.

    Folders are read with all that is in them, but for what ignore files (.gitignore, .ignore,
    .cacheblendignore) name, hidden files, symbolic links and what holds no text; what is named
    itself is read whatever it is. What is stored already is checked, and left as it is unless it
    is damaged; a document that changed replaces what it was. It can be interrupted: the next run
    goes on from there.
    """
    if not dry_run and (jsonl or fields):
        raise UsageError("--jsonl and --fields are for a list of chunks", "add --dry-run")
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    if type_list:
        list_types(out)
        return
    if not paths and files_from is None:
        raise UsageError("nothing to ingest was named", "give files or folders: ingest notes/")
    if watch:
        check_watch(paths or [], files_from=files_from, dry_run=dry_run)
    if options.get("devices") is not None and options.get("device") is not None:
        raise UsageError("--devices and --device exclude each other", "give one of them")
    settings = load_settings(options)
    check_engine(settings, "devices")
    found = chosen_files(
        settings, paths or [], files_from=files_from, null=null, stdin_name=stdin_name
    )
    places = (
        settings.devices if options.get("device") is None and settings.engine == "torch" else ()
    )
    if places:  # the first one's say in what `auto` leaves open
        settings = replace(settings, device=places[0])
    blueprint = open_blueprint(settings, out)
    blueprint.check_chunk_tokens(settings.chunk_tokens)
    if blueprint.context == "bos" and not blueprint.chunk_context:
        out.warn(
            f"{blueprint.name} has no token that every prompt begins with",
            "its chunks are computed behind nothing, as with --context none",
        )
    if dry_run:
        _show_chunks(out, settings, blueprint, found)
    elif watch:
        keep_current(out, settings, blueprint, places, paths or [])
    else:
        with IngestRun(out, settings, blueprint, places) as run:
            done = run.ingest(found)
        tell(out, blueprint, done)
        if done.plan.unreadable:
            raise typer.Exit(ExitCode.FAILED)


def _show_chunks(
    out: Output, settings: Settings, blueprint: Blueprint, found: Iterator[Found]
) -> None:
    """What `ingest` would cut, without opening the store or the weights."""
    from cache_store.entry import predicted_file_bytes
    from engine.chunking import Cutting
    from engine.documents import Document, Skipped, Unreadable

    cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
    context_tokens = len(blueprint.chunk_context)
    failed, count = False, 0
    skipped: list[Skipped] = []
    sizes: dict[str, tuple[int, int]] = {}  # of distinct chunks, tokens and bytes

    def records() -> Iterator[dict[str, Any]]:
        nonlocal failed, count
        for item in read_all(out, settings, found):
            if isinstance(item, Unreadable):
                out.warn(f"{shown_source(item.source)}: {item.reason}", "would be left out")
                failed = True
            if isinstance(item, Skipped):
                skipped.append(item)
            if not isinstance(item, Document):
                continue
            for ordinal, chunk in enumerate(cutting.cut(item, blueprint.tokenizer)):
                tokens = len(chunk.token_ids)
                nbytes = predicted_file_bytes(blueprint.shape, tokens, context_tokens)
                sizes[chunk.chunk_id] = tokens, nbytes
                count += 1
                yield {**cut_record(chunk, item.source, ordinal), "bytes": nbytes}

    def totals() -> tuple[int, int]:
        return sum(t for t, _ in sizes.values()), sum(b for _, b in sizes.values())

    def around(chunks: Sequence[Any]) -> dict[str, Any]:
        tokens, nbytes = totals()
        context = context_record(blueprint)
        facts = {"tokens": tokens, "bytes": nbytes, "context": context}
        return {"chunks": chunks, **facts, **skipped_record(skipped)}

    out.list(CUT_CHUNKS, records(), around=around)
    tokens, nbytes = totals()
    out.note(
        f"{count_text(count, 'chunks')}, {count_text(tokens, 'tokens')}, "
        f"about {size_text(nbytes)} of KV{behind(blueprint)}; nothing was stored"
    )
    if skipped:
        out.note(skipped_line(skipped) + ("" if out.verbose else " (-v names them)"))
        name_skipped(out, skipped)
    if failed:
        raise typer.Exit(ExitCode.FAILED)
