"""`cacheblend store ls`: what is stored, chunk by chunk or document by document."""

from __future__ import annotations

from typing import Annotated

import typer

from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Verbose, examples
from cbcli.listing import Fields, Jsonl, ListForm, QuietIds
from cbcli.listing_choice import SORTS, ListingChoice
from cbcli.output import Output
from cbcli.present import recall
from cbcli.settings import load_settings
from cbcli.store_listing import CHUNKS, DOCUMENTS, StoreListing, chunk_rows

EXAMPLES = examples(
    "cacheblend store ls",
    "cacheblend store ls --documents --sort size --limit 10",
    "cacheblend store ls --filter 'notes/*.md' --missing",
    "cacheblend store ls --jsonl --fields chunk_id,source,tokens",
)


@flags.with_settings("model", "kv_dtype", "store", "pager")
def list_store(
    documents: Annotated[
        bool, typer.Option("--documents", help="List the documents, not their chunks.")
    ] = False,
    filter: Annotated[
        str,
        typer.Option(
            "--filter",
            help="Only what has this in its source or text, or begins its id; with * or ? a "
            "pattern for sources.",
            metavar="TEXT",
        ),
    ] = "",
    collection: flags.Collection = None,
    sort: Annotated[
        str, typer.Option("--sort", help=f"{', '.join(SORTS)}; the largest and latest first.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", help="List so many at most.", min=1)
    ] = None,
    cached: Annotated[
        bool | None, typer.Option("--cached/--missing", help="Only those with, or without, KV.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    jsonl: Jsonl = False,
    fields: Fields = None,
    quiet: QuietIds = False,
    verbose: Verbose = 0,
) -> None:
    """List the chunks of documents, and whether their KV is here.

    Also whether the present settings can use it.

    A chunk whose KV isn't stored can still be asked about: it is computed on the way. KV behind
    another prefix is used, but never counts as exact; KV of another model, tokenizer or dtype
    isn't used (`store prune --stale` removes it)."""
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    choice = ListingChoice(filter, sort, limit, cached)
    settings = load_settings(options)
    with ChunkStore.open(settings.store, read_only=True) as store:
        listing = StoreListing(store, recall(settings), collection or ())
        listing.choose(choice, documents=documents)
        if documents:
            out.list(DOCUMENTS, listing.document_records(), around=listing.around_documents)
        else:
            records = listing.chunk_records()
            out.list(CHUNKS, records, rows=chunk_rows, around=listing.around_chunks)
        out.note(listing.summary())
        if listing.present is None and listing.entries and not documents:
            out.note(
                f"usable: not known until {settings.model} is used once with these settings "
                "(ask, run or ingest)"
            )
