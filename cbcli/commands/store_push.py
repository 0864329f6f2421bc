"""`cacheblend store push`: gives the remote store what it is still to be given."""

from __future__ import annotations

from typing import Annotated

import typer

from cache_store.errors import UsageError
from cache_store.tiers.addresses import masked
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.output import Output
from cbcli.session import open_existing_store, tiered
from cbcli.settings import load_settings
from cbcli.store_listing import plural

EXAMPLES = examples("cacheblend store push", "cacheblend store push --all --remote s3://bucket/kv")


@flags.with_settings(flags.STORE, "progress")
def push(
    everything: Annotated[
        bool, typer.Option("--all", help="All that is stored here, not only what is pending.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Upload what the remote store is still to be given.

    What is ingested is uploaded in the background; this goes on with what was left, as after a
    remote that was down. Entries that the remote has already are not sent again."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    if settings.remote is None:
        raise UsageError("no remote store is set", "give its address with --remote")
    with open_existing_store(settings) as opened:
        opened.require_writable()
        store = tiered(opened)
        assert store is not None  # a remote is set
        assert store.uploads is not None
        uploads, where = store.uploads, masked(settings.remote)
        pending = uploads.pending()

        def on_left(left: int) -> None:
            progress.update(uploads.done.total(), total=uploads.done.total() + left)

        with out.progress(f"uploading to {where}", unit="entries") as progress:
            left = store.push(everything=everything, on_left=on_left)
        sent, there = uploads.done["sent"], uploads.done["there"]
    if json:
        out.data({"remote": where, "uploaded": sent, "there": there, "left": left})
        return
    kept = f"; {there} were there already" if there else ""
    out.line(f"{plural(sent, 'entry', 'entries')} given to {where}{kept}")
    if not pending and not everything:
        out.note("nothing was waiting to be uploaded; --all gives all that is stored here")
