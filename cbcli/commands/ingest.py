"""`cacheblend ingest`: documents into the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_store.errors import UsageError
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import ExitCode, Interrupted
from cbcli.fields import CUT_CHUNKS
from cbcli.ingest_report import behind, context_record, tell
from cbcli.listing import Fields, Jsonl, ListForm
from cbcli.output import Output
from cbcli.present import remember
from cbcli.records import cut_record
from cbcli.session import (
    check_engine,
    load_engine,
    open_blueprint,
    open_store,
    say_notes,
    shown_source,
    upload,
)
from cbcli.settings import Settings, load_settings
from cbcli.units import count_text, size_text

if TYPE_CHECKING:
    from cbcli.live.ingest import IngestScene
    from cbcli.progress import Progress
    from engine.blueprint import Blueprint
    from engine.documents import Document, Found, Skipped, Unreadable
    from engine.ingest import ChunkComputer
    from engine.ingest_plan import OnBytes

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend ingest notes/ report.md",
        "cacheblend ingest --dry-run notes/",
        "man -P cat ssh | cacheblend ingest - --stdin-name ssh.txt",
        "cacheblend ingest --devices cuda:0,cuda:1 library/",
    )
)
@flags.with_settings(
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
        list[str], typer.Argument(help="Files, folders, or - for standard input.", metavar="PATH…")
    ],
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

    Text files of any kind are read, folders with all that is in them. What is stored already is
    checked, and left as it is unless it is damaged; a document that changed replaces what it was.
    It can be interrupted: the next run goes on from there.
    """
    if not dry_run and (jsonl or fields):
        raise UsageError("--jsonl and --fields are for a list of chunks", "add --dry-run")
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    if options.get("devices") is not None and options.get("device") is not None:
        raise UsageError("--devices and --device exclude each other", "give one of them")
    settings = load_settings(options)
    check_engine(settings, "devices")
    from engine.documents import find_files

    found = find_files(paths, stdin_name=stdin_name)
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
    else:
        _ingest(out, settings, blueprint, places, found)


def _ingest(
    out: Output,
    settings: Settings,
    blueprint: Blueprint,
    places: tuple[str, ...],
    found: Iterable[Found],
) -> None:
    from engine.chunking import Cutting
    from engine.ingest import IngestReport, run_ingest
    from engine.ingest_plan import Cutter
    from engine.model import choose_device

    for place in places:
        choose_device(place)  # whether it is there, before any work

    began = time.monotonic()
    report = IngestReport()
    with (
        open_store(settings, on_damage="mend") as store,
        _scene(out, settings) as scene,
        ExitStack() as closing,
    ):
        for problem in store.mended:
            out.warn(f"{problem.where}: {problem.what}")
        if store.read_only:
            raise UsageError(f"{settings.store}: the store cannot be written", "see its owner")
        cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
        cutter = Cutter(store, blueprint, cutting, settings.check)
        with out.progress("checking", unit="bytes") as progress:
            plan = cutter.plan(_read(out, found), _shown(progress))
        store.catalog.name_model(blueprint.spec.model, blueprint.name)
        remember(settings, blueprint)
        if scene is not None:
            scene.work(plan, report, cutter.predicted_bytes)
        try:
            with out.progress("computing", unit="tokens", total=plan.tokens) as progress:

                def make_writer() -> ChunkComputer:
                    if scene is not None:
                        scene.computing()
                    if len(places) > 1 and plan.missing:
                        from engine.ingest_workers import DeviceWriters

                        progress.update(0, label=f"computing on {', '.join(places)}")
                        return DeviceWriters(
                            places,
                            blueprint,
                            store,
                            tokens=plan.tokens,
                            protected=plan.held,
                            threads=settings.threads,
                            say=out.warn,
                        )
                    progress.update(0, label="loading the model")
                    engine = closing.enter_context(
                        load_engine(settings, blueprint, store, longest=1, out=out)
                    )
                    writer = engine.writer()
                    progress.update(0, label="computing")
                    if scene is not None:
                        scene.computing()
                    return writer

                run_ingest(plan, cutter, make_writer, report, progress.update, settings.collections)
            seconds = time.monotonic() - began
            upload(store, out)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {report.computed_chunks} of {len(plan.missing)} chunks computed and "
                f"stored, {report.documents} of {len(plan.documents)} documents complete",
                "run the same command again to go on from there",
            ) from error
    say_notes(store, out)
    tell(out, blueprint, plan, report, store.damaged, seconds)
    if plan.unreadable:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _scene(out: Output, settings: Settings) -> Iterator[IngestScene | None]:
    """What shows the work while it is done, where that is wanted."""
    if not settings.live:
        yield None
        return
    from cbcli.live.ingest import IngestScene

    scene = IngestScene(shown_source)
    with out.live(scene) as view:
        yield scene
        view.close(keep=False)  # what was done is reported


def _read(out: Output, found: Iterable[Found]) -> Iterator[Document | Unreadable | Skipped]:
    """Reads the files one by one, with progress."""
    from engine.documents import read_documents

    with out.progress("reading", unit="files") as progress:
        for number, item in enumerate(read_documents(found), 1):
            yield item
            progress.update(number)


def _shown(progress: Progress) -> OnBytes:
    """Shows checking, where it takes long, and downloading."""
    began, now = 0.0, ""

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal began, now
        if what != now:
            began, now = time.monotonic(), what
            progress.restart(what)
        if what != "checking" or time.monotonic() - began > 1:
            progress.update(done, total=total)

    return show


def _show_chunks(
    out: Output, settings: Settings, blueprint: Blueprint, found: Iterable[Found]
) -> None:
    """What `ingest` would cut, without opening the store or the weights."""
    from cache_store.entry import predicted_file_bytes
    from engine.chunking import Cutting
    from engine.documents import Document, Unreadable, read_documents

    cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
    context_tokens = len(blueprint.chunk_context)
    failed, count = False, 0
    sizes: dict[str, tuple[int, int]] = {}  # of distinct chunks, tokens and bytes

    def records() -> Iterator[dict[str, Any]]:
        nonlocal failed, count
        for item in read_documents(found):
            if isinstance(item, Unreadable):
                out.warn(f"{shown_source(item.source)}: {item.reason}", "would be left out")
                failed = True
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
        return {"chunks": chunks, "tokens": tokens, "bytes": nbytes, "context": context}

    out.list(CUT_CHUNKS, records(), around=around)
    tokens, nbytes = totals()
    out.note(
        f"{count_text(count, 'chunks')}, {count_text(tokens, 'tokens')}, "
        f"about {size_text(nbytes)} of KV{behind(blueprint)}; nothing was stored"
    )
    if failed:
        raise typer.Exit(ExitCode.FAILED)
