"""`cacheblend store limit`: how large the store may get, and what goes first then."""

from __future__ import annotations

from typing import Annotated

import typer

from cache_store.errors import UsageError
from cache_store.eviction import Policy, check_policy
from cache_store.place import KV_FOLDER, MIN_LIMIT
from cache_store.space import disk_usage
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.output import Output
from cbcli.store_access import freeing, reading, store_settings, writing
from cbcli.store_listing import plural
from cbcli.units import size_text
from engine.kinds import parse_size

EXAMPLES = examples(
    "cacheblend store limit",
    "cacheblend store limit 50GB",
    "cacheblend store limit --eviction lfu",
)

_WORDS: dict[Policy, str] = {
    "lru": "evicts what was used longest ago",
    "lfu": "evicts what was used least",
    "none": "evicts nothing",
}


@flags.with_settings("store")
def limit(
    size: Annotated[
        str | None, typer.Argument(help="The new limit: 50GB, 500MiB or a number of bytes.")
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option("--eviction", help="What goes first: lru, lfu or none.", metavar="POLICY"),
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show how large the store may get and what goes first then, or set it.

    The limit counts every byte on the disk; 4.2 MB is the least, and some 2 MB of it are kept free
    for the databases and their logs. A smaller one removes chunks: first those that only
    prompts saved, then those used longest ago (lru) or least (lfu); with none, nothing is removed
    and what doesn't fit is refused. Pinned documents stay. Where there is no store yet, one is
    made."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    policy = None if eviction is None else check_policy(eviction)
    evicted = 0
    if size is not None:
        wanted = _size(size)
        folder = store_settings(options).store
        if (folder / KV_FOLDER).is_dir() and wanted < disk_usage(folder):
            with freeing(options, out):
                pass
        with ChunkStore.open(store_settings(options).store, limit_bytes=wanted) as store:
            if policy is not None:
                store.set_eviction(policy)
            before = sum(1 for _ in store.entries())
            store.set_limit(wanted)
            evicted = before - sum(1 for _ in store.entries())
    elif policy is not None:
        with writing(options) as store:
            store.set_eviction(policy)
    with reading(options) as store:
        now, used, policy = store.limit, store.used_bytes(), store.eviction
    if json:
        out.data({"limit": now, "used": used, "eviction": policy, "entries_evicted": evicted})
        return
    out.line(f"{size_text(now)} ({now} bytes), {size_text(used)} used; {_WORDS[policy]} ({policy})")
    if evicted:
        out.note(f"removed {plural(evicted, 'entry', 'entries')} to fit")


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise UsageError(f"the limit is {text!r}", f"expected {error}") from None
    if size < MIN_LIMIT:
        raise UsageError(f"a limit of {text} is too small", f"at least {size_text(MIN_LIMIT)}")
    return size
