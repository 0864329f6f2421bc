"""The store as the commands of `cacheblend store` open it, and what a user names in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from cache_store.database import free_bytes
from cache_store.errors import NotFoundError, UsageError
from cache_store.rebuild import OnDamage
from cache_store.store import ChunkStore
from cbcli.command import nearest
from cbcli.errors import ExitCode
from cbcli.flags import Options
from cbcli.output import Output
from cbcli.session import shown_source
from cbcli.settings import Settings, load_settings
from cbcli.store_listing import plural

_ROOM = 2**18  # bytes that writing down what goes may take


def store_settings(options: Options) -> Settings:
    """The settings, with the store that a flag names."""
    return load_settings(options)


def reading(options: Options, on_damage: OnDamage = "raise") -> ChunkStore:
    """The store, to be looked at. Raises NotFoundError where there is none."""
    return ChunkStore.open(store_settings(options).store, read_only=True, on_damage=on_damage)


@contextlib.contextmanager
def writing(options: Options, on_damage: OnDamage = "raise") -> Iterator[ChunkStore]:
    """A store to be changed, which must be there already."""
    where = store_settings(options).store
    if on_damage == "raise" or not where.exists():
        ChunkStore.open(where, read_only=True).close()
    with ChunkStore.open(where, on_damage=on_damage) as store:
        store.require_writable()
        yield store


@contextlib.contextmanager
def freeing(options: Options, out: Output) -> Iterator[ChunkStore]:
    """A store that space is to be freed in, be the disk so full that nothing could be written
    down: then entries go first, in the order of eviction."""
    where, gone = store_settings(options).store, []
    if where.is_dir() and free_bytes(where) < _ROOM:
        with ChunkStore.open(where, read_only=True) as full:
            gone = full.give_way(2 * _ROOM)
    with writing(options) as store:
        if gone:
            entries = plural(len(gone), "entry", "entries")
            out.warn(f"the disk is full: {entries} went first, to have room to work in")
        for key in gone:
            store.discard(key)
        yield store


def known_source(store: ChunkStore, given: str) -> str:
    """The source of a document as the catalog has it: as given, or as a path from here.

    Raises NotFoundError, naming the nearest one.
    """
    for name in (given, os.path.normpath(given), os.path.normpath(Path.cwd() / given)):
        if store.catalog.document(name) is not None:
            return name
    near = nearest(given, [shown_source(info.source) for info in store.catalog.documents()])
    raise NotFoundError(
        f"no document {given!r} in the store",
        f"did you mean {near!r}?" if near else "cacheblend store ls --documents shows them",
    )


def is_interactive() -> bool:
    return sys.stdin.isatty()


def confirm(question: str) -> None:
    """Asks for consent. Raises UsageError where nobody can be asked, Exit where it is refused."""
    if not is_interactive():
        raise UsageError("there is nobody to ask for consent", "add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(ExitCode.FAILED)
