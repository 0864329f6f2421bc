"""`cacheblend store warm`: chunks made ready before somebody asks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.errors import Interrupted
from cbcli.output import Output
from cbcli.present import remember
from cbcli.session import load_engine, open_blueprint, open_existing_store
from cbcli.settings import load_settings
from cbcli.store_choice import chosen_sources
from cbcli.store_listing import plural
from cbcli.units import duration_text, size_text

if TYPE_CHECKING:
    from engine.warm import WarmReport

EXAMPLES = examples(
    "cacheblend store warm --all", "cacheblend store warm --document notes/plan.md 3f9a1c2b"
)


@flags.with_settings(flags.PROMPT, flags.STORE, flags.MODEL, "progress")
def warm(
    chunks: Annotated[
        list[str] | None,
        flags.chunks_argument("Chunks to make ready."),
    ] = None,
    document: Annotated[
        list[str] | None,
        flags.documents_option("All chunks of a document; repeatable."),
    ] = None,
    collection: flags.Collection = None,
    everything: Annotated[bool, typer.Option("--all", help="All chunks of all documents.")] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Make chunks ready for the next prompts, with the present settings.

    KV that is there is read and checked, so that the system keeps it in memory; what only the
    remote has is fetched; what is missing is computed and stored. The model is loaded only where
    something has to be computed."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    if everything == bool(chunks or document or collection):
        raise UsageError(
            "say what to make ready", "give chunk ids, --document, --collection or --all"
        )
    settings = load_settings(options)
    began = time.monotonic()
    with open_existing_store(settings) as opened:
        texts = _texts(
            opened, chunks or [], document or [], collection or [], everything=everything
        )
        blueprint = open_blueprint(settings, out)
        remember(settings, blueprint)
        from engine.warm import Warming, WarmReport

        report = WarmReport()
        try:
            with out.progress("fetching", unit="bytes") as progress:
                work = Warming(opened, blueprint, texts, progress.update)
                report = work.report
            with out.progress("reading", unit="bytes", total=work.present_bytes) as progress:
                work.read(progress.update)
            work.require_room(blueprint)
            if work.missing:
                tokens = sum(len(chunk.token_ids) for chunk in work.missing)
                with out.progress("computing", unit="tokens", total=tokens) as progress:
                    writer = load_engine(settings, blueprint, opened, out=out).writer()
                    work.compute(writer, progress.update)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {report.read} read, {report.fetched} fetched, "
                f"{report.computed} computed",
                "run the same command again to go on from there",
            ) from error
    _report(out, report, len(dict(texts)), time.monotonic() - began)


def _texts(
    store: ChunkStore,
    ids: list[str],
    documents: list[str],
    collections: list[str],
    *,
    everything: bool,
) -> list[tuple[str, str]]:
    """Ids and texts of the chunks chosen. Raises NotFoundError, UsageError as the catalog does."""
    if everything:
        found = store.catalog.chunks()
    else:
        found = [store.catalog.chunk(given) for given in ids]
        for source in chosen_sources(store, documents, collections) or ():
            found += store.catalog.chunks(source)
    return [(chunk.chunk_id, chunk.text) for chunk in found]


def _report(out: Output, report: WarmReport, chunks: int, seconds: float) -> None:
    if out.json:
        out.data(
            {
                "chunks": chunks,
                "read": report.read,
                "bytes_read": report.nbytes,
                "fetched": report.fetched,
                "computed": report.computed,
                "damaged": report.damaged,
                "seconds": seconds,
            }
        )
        return
    parts = [f"{report.read:,} read ({size_text(report.nbytes)})"]
    if report.fetched:
        parts.append(f"{report.fetched:,} of them fetched from the remote")
    parts.append(f"{report.computed:,} computed")
    if report.damaged:
        parts.append(f"{report.damaged:,} of them damaged before")
    if not out.quiet:
        out.line(
            f"{plural(chunks, 'chunk', 'chunks')} ready: {', '.join(parts)}, in "
            f"{duration_text(seconds)}"
        )
