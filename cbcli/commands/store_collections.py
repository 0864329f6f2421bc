"""`cacheblend store collections`: documents that are chosen together, by a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cache_store.collecting import check_collection_name
from cache_store.errors import UsageError
from cache_store.store import ChunkStore
from cbcli import completion, flags
from cbcli.command import Group, Json, Quiet, Verbose, app_options, examples
from cbcli.listing import Field, Fields, Jsonl, ListForm, Listing, QuietIds
from cbcli.output import Output
from cbcli.store_access import reading, writing
from cbcli.store_choice import chosen_sources
from cbcli.store_listing import plural
from cbcli.units import count_text


class _Listing(Group):
    """A group that lists where no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super(Group, self).parse_args(ctx, args)


app = typer.Typer(
    cls=_Listing,
    **app_options(),
    invoke_without_command=True,
    epilog=examples(
        "cacheblend store collections",
        "cacheblend store collections add work notes/plan.md",
        "cacheblend store collections rm work",
    ),
)

COLLECTIONS = Listing(
    "collections",
    "name",
    (
        Field("name", "collection"),
        Field("documents", show=count_text, right=True),
        Field("chunks", show=count_text, right=True),
        Field("tokens", show=count_text, right=True),
    ),
)

Name = Annotated[
    str, typer.Argument(autocompletion=completion.collections, metavar="NAME", help="A collection.")
]
Sources = Annotated[
    list[str],
    flags.documents_argument("SOURCE..."),
]


@app.callback()
@flags.with_settings("store")
def collections(
    ctx: typer.Context,
    options: flags.Options = flags.NONE,
    json: Json = False,
    jsonl: Jsonl = False,
    fields: Fields = None,
    quiet: QuietIds = False,
    verbose: Verbose = 0,
) -> None:
    """List the collections of documents, or change them.

    `ingest --collection NAME` puts documents into one, and commands that choose chunks or
    documents take --collection. A document may be in several."""
    if ctx.invoked_subcommand is not None:
        sources = map(ctx.get_parameter_source, ctx.params)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            raise UsageError(
                f"flags stand before {ctx.invoked_subcommand}", "put them behind the command"
            )
        return
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    with reading(options) as store:
        found = store.catalog.collection_infos()
    if found or out.json:
        out.list(COLLECTIONS, [asdict(info) for info in found])
    else:
        out.note("no collections; cacheblend ingest --collection NAME makes one")


@app.command(epilog=examples("cacheblend store collections add work notes/plan.md notes/todo.md"))
@flags.with_settings("store")
def add(
    name: Name,
    sources: Sources,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Put stored documents into a collection, a new one too."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_collection_name(name)
    with writing(options) as store:
        chosen = chosen_sources(store, sources) or []
        _report(out, store, name, chosen, store.catalog.collect(name, chosen), "put into")


@app.command(epilog=examples("cacheblend store collections remove work notes/plan.md"))
@flags.with_settings("store")
def remove(
    name: Name,
    sources: Sources,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Take documents out of a collection. They stay in the store."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    with writing(options) as store:
        store.catalog.require_collections([name])
        chosen = chosen_sources(store, sources) or []
        _report(out, store, name, chosen, store.catalog.uncollect(name, chosen), "taken out of")


@app.command(epilog=examples("cacheblend store collections rm work"))
@flags.with_settings("store")
def rm(
    name: Name,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Forget a collection. Its documents stay in the store."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    with writing(options) as store:
        store.catalog.require_collections([name])
        changed = store.catalog.uncollect(name)
    if json:
        out.data({"collection": name, "changed": changed, "documents": 0})
    else:
        stay = "stays" if changed == 1 else "stay"
        out.line(f"{name} is forgotten; its {plural(changed, 'document', 'documents')} {stay}")


def _report(
    out: Output, store: ChunkStore, name: str, chosen: Sequence[str], changed: int, done: str
) -> None:
    """changed: how many of the documents chosen weren't as they are now."""
    now = {info.name: info.documents for info in store.catalog.collection_infos()}.get(name, 0)
    if out.json:
        out.data({"collection": name, "changed": changed, "documents": now})
        return
    already = len(chosen) - changed
    was = f", {already} {'was' if already == 1 else 'were'} so already" if already else ""
    out.line(f"{plural(changed, 'document', 'documents')} {done} {name}{was}; it has {now} now")
