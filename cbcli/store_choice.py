"""Documents and models as a user names them, for commands that choose some of a store's."""

from __future__ import annotations

from collections.abc import Sequence

from cache_store.errors import NotFoundError, UsageError
from cache_store.store import ChunkStore
from cbcli.command import nearest
from cbcli.store_access import known_source

_LEAST_DIGITS = 4


def chosen_sources(
    store: ChunkStore, given: Sequence[str] | None, collections: Sequence[str] | None = None
) -> list[str] | None:
    """The sources of the documents named, and of those in the collections named, each once; None
    where nothing is. Raises NotFoundError for a document or collection that isn't there."""
    if not given and not collections:
        return None
    found = [known_source(store, name) for name in given or ()]
    if collections:
        found += [d.source for d in store.catalog.documents(collections=collections)]
    return list(dict.fromkeys(found))


def chosen_models(store: ChunkStore, given: Sequence[str] | None) -> frozenset[str] | None:
    """The fingerprints of the models named, by name or by the beginning of a fingerprint; None
    where none is. A name may stand for several, as its weights changed.

    Raises NotFoundError for one that no entry is of, UsageError for an ambiguous beginning.
    """
    if not given:
        return None
    names = {m: store.catalog.model_name(m) or "" for m in {e.spec.model for e in store.entries()}}
    found: set[str] = set()
    for wanted in given:
        fitting = {model for model, name in names.items() if name == wanted}
        if not fitting and len(wanted) >= _LEAST_DIGITS:
            fitting = {model for model in names if model.startswith(wanted.lower())}
            if len(fitting) > 1:
                raise UsageError(
                    f"{wanted!r} is the beginning of {len(fitting)} fingerprints", "give more of it"
                )
        if not fitting:
            near = nearest(wanted, [name for name in names.values() if name])
            raise NotFoundError(
                f"the store has nothing of a model {wanted!r}",
                f"did you mean {near!r}?" if near else "cacheblend store stats names its models",
            )
        found |= fitting
    return frozenset(found)
