"""`cacheblend store prune`: removes what is old, unused, of no use, or too much."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.output import Output
from cbcli.present import present_of, remember
from cbcli.session import open_blueprint, shown_source
from cbcli.settings import Settings, load_settings
from cbcli.store_access import freeing, reading
from cbcli.store_choice import chosen_models, chosen_sources
from cbcli.store_listing import plural
from cbcli.units import parse_duration, size_text
from engine.kinds import parse_size

if TYPE_CHECKING:
    from cache_store.prune import PruneChoice, PrunePlan, PruneReport
    from cache_store.usable import Present

EXAMPLES = examples(
    "cacheblend store prune --unused-for 30d --dry-run",
    "cacheblend store prune --stale",
    "cacheblend store prune --missing-sources",
    "cacheblend store prune --over 10GB --model smollm2-135m",
)


@flags.with_settings("store", "dtype", "kv_dtype")
def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Stored longer ago: 30d, 12h, 2w.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option("--unused-for", help="Last used longer ago: 7d.")
    ] = None,
    of_model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Of this model: its name, or its fingerprint; repeatable."),
    ] = None,
    collection: flags.Collection = None,
    over: Annotated[
        str | None,
        typer.Option(
            "--over", help="Only until the store is down to this size, by its eviction policy."
        ),
    ] = None,
    missing_sources: Annotated[
        bool, typer.Option("--missing-sources", help="Documents whose files are gone, too.")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="That the present settings can't use.")
    ] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Of chunks that no document has.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Remove stored KV by age, use, model, size, or as useless.

    Several choices together remove what all of them are true of. Chunks of pinned documents stay,
    and what another process is using is passed over. KV alone goes, and the text stays to be
    computed again; but --missing-sources takes documents out of the store, with the KV of chunks
    that no other has. What was read from standard input or imported has no file here to miss."""
    from cache_store.prune import PruneReport, documents_to_go, plan_prune
    from cache_store.prune import prune as carry_out

    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    ages = [_age("--older-than", older_than), _age("--unused-for", unused_for)]
    size = _size(over)
    settings = load_settings(options)
    if not (
        any((stale, missing_sources, orphans, of_model, collection))
        or over
        or older_than
        or unused_for
    ):
        raise UsageError("say what to remove", "give --unused-for 30d, --stale or another; --help")
    with reading(options) if dry_run else freeing(options, out) as store:
        choice = _choice(store, settings, out, ages, size, of_model, stale=stale)
        sources = chosen_sources(store, None, collection)
        choice = replace(choice, sources=None if sources is None else frozenset(sources))
        choice = _with_documents(store, choice, missing=missing_sources, orphans=orphans)
        plan = plan_prune(store, choice)
        if dry_run:
            least = plan.least()
            report = PruneReport(
                documents_to_go(store, plan), len(least), sum(e.nbytes for e in least)
            )
        else:
            report = carry_out(store, plan)
        others = _cut_otherwise(store, settings, choice.present) if stale else []
        used = store.used_bytes()
    _report(out, plan, report, others, used, dry_run=dry_run)
    if size is not None and not dry_run and used > size:
        out.warn(
            f"the store is still at {size_text(used)}",
            "the rest is in use, pinned, not chosen, or no KV",
        )


def _choice(
    store: ChunkStore,
    settings: Settings,
    out: Output,
    ages: list[float | None],
    over: int | None,
    models: list[str] | None,
    *,
    stale: bool,
) -> PruneChoice:
    from cache_store.prune import PruneChoice

    present = None
    if stale:
        blueprint = open_blueprint(settings, out)
        present = present_of(blueprint)
        remember(settings, blueprint)
    return PruneChoice(
        stored_before=ages[0],
        used_before=ages[1],
        models=chosen_models(store, models),
        present=present,
        over=over,
    )


def _with_documents(
    store: ChunkStore, choice: PruneChoice, *, missing: bool, orphans: bool
) -> PruneChoice:
    found = None
    if missing:
        from engine.changes import missing_files

        found = missing_files(store.catalog.documents())
    return replace(choice, missing=found, orphans=orphans)


def _cut_otherwise(store: ChunkStore, settings: Settings, present: Present | None) -> list[str]:
    """Documents that ingesting with the present settings would cut anew."""
    from engine.chunking import Cutting

    cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
    now = cutting.record(present.spec.tokenizer if present else "")
    documents = store.catalog.documents()
    return [info.source for info in documents if info.settings != now]


def _report(
    out: Output,
    plan: PrunePlan,
    report: PruneReport,
    cut_otherwise: list[str],
    used: int,
    *,
    dry_run: bool,
) -> None:
    if out.json:
        out.data(
            {
                "dry_run": dry_run,
                "documents": list(report.documents),
                "entries": report.entries,
                "bytes_freed": report.nbytes,
                "in_use": report.in_use,
                "pinned": plan.pinned,
                "cut_otherwise": cut_otherwise,
                "used": used,
            }
        )
        return
    what = [plural(report.entries, "entry", "entries")]
    if report.documents:
        what.insert(0, plural(len(report.documents), "document", "documents"))
    verb, end = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    out.line(f"{verb} {' and '.join(what)}, {size_text(report.nbytes)} {end}")
    for source in report.documents if out.verbose or dry_run else ():
        out.note(f"document {shown_source(source)}")
    if report.in_use:
        out.note(f"{plural(report.in_use, 'entry', 'entries')} in use: left")
    if plan.pinned:
        out.note(f"{plural(plan.pinned, 'entry', 'entries')} of pinned documents: left")
    if cut_otherwise:
        out.note(
            f"{plural(len(cut_otherwise), 'document', 'documents')} cut otherwise than the present "
            "settings would: ingest again to have their chunks anew"
        )


def _age(flag: str, text: str | None) -> float | None:
    """The moment before which it must have been."""
    if text is None:
        return None
    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{flag} is {text!r}", f"expected {error}") from None


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--over is {text!r}", f"expected {error}") from None
