"""`cacheblend store pin` and `unpin`: documents whose chunks are never evicted."""

from __future__ import annotations

from typing import Annotated

import typer

from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.output import Output
from cbcli.session import shown_source
from cbcli.store_access import writing
from cbcli.store_choice import chosen_sources
from cbcli.store_listing import plural

EXAMPLES = examples("cacheblend store pin notes/plan.md", "cacheblend store pin --all")
UNPIN_EXAMPLES = examples("cacheblend store unpin notes/plan.md", "cacheblend store unpin --all")

Sources = Annotated[
    list[str] | None,
    flags.documents_argument("SOURCE…"),
]


@flags.with_settings("store")
def pin(
    sources: Sources = None,
    everything: Annotated[bool, typer.Option("--all", help="Pin all documents.")] = False,
    collection: flags.Collection = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Keep documents' chunks in the store: they are never evicted to make room.

    They can still be removed by name, and a pinned document can be ingested again."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    with writing(options) as store:
        chosen = _chosen(store, sources, collection, everything)
        changed = store.pins.pin(chosen, True)
        _report(out, store, chosen, changed, "pinned")


@flags.with_settings("store")
def unpin(
    sources: Sources = None,
    everything: Annotated[bool, typer.Option("--all", help="Unpin all documents.")] = False,
    collection: flags.Collection = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Let documents' chunks be evicted again."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    with writing(options) as store:
        chosen = _chosen(store, sources, collection, everything)
        changed = store.pins.pin(chosen, False)
        _report(out, store, chosen, changed, "unpinned")


def _chosen(
    store: ChunkStore,
    sources: list[str] | None,
    collections: list[str] | None,
    everything: bool,
) -> list[str]:
    chosen = chosen_sources(store, sources, collections)
    if (chosen is not None) == everything:
        raise UsageError("say which documents", "give their names, --collection NAME or --all")
    return chosen or [document.source for document in store.catalog.documents()]


def _report(out: Output, store: ChunkStore, chosen: list[str], changed: int, done: str) -> None:
    pinned = store.pins.documents()
    if out.json:
        out.data({"documents": chosen, "changed": changed, "pinned": pinned})
        return
    already = len(chosen) - changed
    was = f", {already} {'was' if already == 1 else 'were'} already" if already else ""
    out.line(f"{done} {plural(changed, 'document', 'documents')}{was}; {len(pinned)} pinned in all")
    for source in chosen:
        out.note(shown_source(source), level=1)
