"""`cacheblend store`: look at the stored chunks and documents, check them, remove them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from cache_store.errors import IntegrityError, UsageError
from cache_store.store import ChunkStore, VerifyReport
from cache_store.verify import ALTERED
from cbcli import flags
from cbcli.command import Group, Json, Quiet, Verbose, app_options, examples
from cbcli.commands import (
    estimate,
    store_collections,
    store_export,
    store_import,
    store_limit,
    store_ls,
    store_pin,
    store_prune,
    store_push,
    store_show,
    store_stats,
    store_warm,
)
from cbcli.fields import SHOWN_DIGITS
from cbcli.output import Output
from cbcli.store_access import (
    confirm,
    freeing,
    reading,
    store_settings,
    writing,
)
from cbcli.store_choice import chosen_sources
from cbcli.store_listing import plural
from cbcli.units import count_text, size_text

app = typer.Typer(cls=Group, **app_options(), help="Look at and tidy the store of chunks.")
app.command("estimate", epilog=estimate.EXAMPLES)(estimate.estimate)
app.command("ls", epilog=store_ls.EXAMPLES)(store_ls.list_store)
app.command("show", epilog=store_show.EXAMPLES)(store_show.show)
app.command("push", epilog=store_push.EXAMPLES)(store_push.push)
app.command("stats", epilog=store_stats.EXAMPLES)(store_stats.stats)
app.command("limit", epilog=store_limit.EXAMPLES)(store_limit.limit)
app.command("pin", epilog=store_pin.EXAMPLES)(store_pin.pin)
app.command("unpin", epilog=store_pin.UNPIN_EXAMPLES)(store_pin.unpin)
app.command("prune", epilog=store_prune.EXAMPLES)(store_prune.prune)
app.command("warm", epilog=store_warm.EXAMPLES)(store_warm.warm)
app.command("export", epilog=store_export.EXAMPLES)(store_export.export)
app.add_typer(store_collections.app, name="collections")
app.command("import", epilog=store_import.EXAMPLES)(store_import.import_archive)


@app.command(
    epilog=examples(
        "cacheblend store rm 3f9a1c2b7d04",
        "cacheblend store rm --document notes/plan.md",
        "cacheblend store rm --all --yes",
    )
)
@flags.with_settings("store")
def rm(
    chunks: Annotated[
        list[str] | None,
        flags.chunks_argument("Chunks whose KV to remove."),
    ] = None,
    document: Annotated[
        list[str] | None,
        flags.documents_option("Remove a document and its chunks."),
    ] = None,
    collection: flags.Collection = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all documents and all stored KV.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Remove stored KV, by chunk, by document, by collection or all of it.

    Removing a chunk by its id removes its KV alone; its text stays with its document. Removing a
    document takes its text out of the store as well, and the KV of chunks no other document has."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    if [bool(chunks), bool(document or collection), everything].count(True) != 1:
        raise UsageError("say what to remove", "give chunk ids, --document, --collection or --all")
    with reading(options) if dry_run else freeing(options, out) as store:
        if everything:
            sources = [info.source for info in store.catalog.documents()]
            keys = [entry.key for entry in store.entries()]
        elif document or collection:
            sources = chosen_sources(store, document, collection) or []
            keys = _keys_of_documents(store, sources)
        else:
            found = [store.catalog.chunk(given).chunk_id for given in chunks or ()]
            sources, keys = (
                [],
                [key for name in dict.fromkeys(found) for key in store.keys_of_chunk(name)],
            )
        if (everything or collection) and not yes and not dry_run:
            docs = plural(len(sources), "document", "documents")
            confirm(f"Remove {docs} and {plural(len(keys), 'stored entry', 'stored entries')}?")
        removed, freed = _remove(store, sources, keys, dry_run=dry_run)
        left = 0 if dry_run else sum(store.has_entry(key) for key in keys)
    if left:
        out.warn(
            f"in use and not removed: {plural(left, 'entry', 'entries')}",
            "run the command again later",
        )
    if json:
        out.data(
            {"documents": sources, "entries": removed, "bytes_freed": freed, "dry_run": dry_run}
        )
        return
    what = [plural(removed, "entry", "entries")]
    if sources:
        what.insert(0, plural(len(sources), "document", "documents"))
    verb, end = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    out.line(f"{verb} {' and '.join(what)}, {size_text(freed)} {end}")


@app.command(epilog=examples("cacheblend store verify", "cacheblend store verify --repair"))
@flags.with_settings("store", "progress")
def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged or belongs to nothing.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Read every stored byte and check it. Exit code 4 where something is wrong.

    With --repair, what is wrong is removed and computed again when it is needed; the exit code is 4
    only if something could not be put right."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    with writing(options, "mend") if repair else reading(options, "go_on") as store:
        total = 0
        with contextlib.suppress(IntegrityError):  # the report says so
            total = sum(entry.nbytes for entry in store.entries())
        with out.progress("checking", unit="bytes", total=total) as progress:
            report = store.verify(repair, progress.update)
        path = store.path
    if json:
        out.data(asdict(report))
    else:
        if report.problems:
            out.table(
                ["where", "problem"], [_problem_row(p.where, p.what) for p in report.problems]
            )
        out.line(_verdict(report))
    left = len(report.problems) - report.repaired
    if left > 0:
        found = f"{plural(left, 'problem', 'problems')} in the store at {path}"
        raise IntegrityError(found, _cure(report, repair=repair))


@app.command(epilog=examples('cd "$(cacheblend store path)"'))
@flags.with_settings("store")
def path(
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Print the folder of the store, whether there is one yet or not."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = store_settings(options)
    if json:
        out.data({"path": str(settings.store), "exists": settings.store.is_dir()})
    else:
        out.line(str(settings.store))


def _keys_of_documents(store: ChunkStore, sources: Sequence[str]) -> list[str]:
    """Entries of the chunks that these documents have and no others."""
    gone = {chunk.chunk_id for source in sources for chunk in store.catalog.chunks(source)}
    for chunk in store.catalog.chunks():
        if chunk.source not in sources:
            gone.discard(chunk.chunk_id)
    return [key for name in sorted(gone) for key in store.keys_of_chunk(name)]


def _remove(
    store: ChunkStore, sources: Sequence[str], keys: Sequence[str], *, dry_run: bool
) -> tuple[int, int]:
    """How many entries went, and the bytes they took."""
    if dry_run:
        sizes = {entry.key: entry.nbytes for entry in store.entries()}
        return len(keys), sum(sizes.get(key, 0) for key in keys)
    for source in sources:
        store.catalog.remove_document(source)
    freed = [store.discard(key) for key in keys]
    return sum(1 for size in freed if size), sum(freed)


def _problem_row(where: str, what: str) -> list[str]:
    entry = len(where) == 64 and "/" not in where
    return [f"entry {where[:SHOWN_DIGITS]}" if entry else where, what]


def _cure(report: VerifyReport, *, repair: bool) -> str:
    """What to do about the problems that are left."""
    altered = any(problem.what == ALTERED for problem in report.problems)
    cures = ["ingest the documents whose text was altered again"] if altered else []
    if not repair and any(problem.what != ALTERED for problem in report.problems):
        cures.append("cacheblend store verify --repair puts right what it can")
    return "; ".join(cures)


def _verdict(report: VerifyReport) -> str:
    text = f"{plural(report.checked, 'entry', 'entries')} checked, {count_text(report.ok)} sound"
    if report.problems:
        text += f", {plural(len(report.problems), 'problem', 'problems')}"
    return f"{text}, {count_text(report.repaired)} repaired" if report.repaired else text
