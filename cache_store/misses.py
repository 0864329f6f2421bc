"""Why a chunk that was looked up had no KV to use."""

from __future__ import annotations

from typing import Literal

from cache_store.catalog import Catalog
from cache_store.errors import CacheblendError
from cache_store.index import Index
from cache_store.keys import KVSpec
from cache_store.usable import difference

MissReason = Literal["absent", "evicted", "damaged", "other_model", "context", "remote"]
"""absent: never stored; evicted: a document has the chunk, so its KV was stored once, and was
evicted or removed since; other_model: stored for another model, tokenizer or KV dtype; context:
stored behind other prefixes only, which were not wanted; damaged: the entry or the index can't be
used; remote: a remote store may have it, and
could not be asked or did not give it."""


def reason_for_miss(
    index: Index,
    catalog: Catalog,
    spec: KVSpec,
    group: str,
    chunk_id: str,
    *,
    damaged: bool,
    strict: bool,
) -> MissReason:
    """To be asked after the answer and before the chunk is stored again: it takes a few queries.

    group: key of the entries that would have served; damaged: whether one of them was met that
    can't be used; strict: whether those behind other prefixes were not wanted.
    """
    if damaged or index.is_stand_in:  # the index itself can't be used
        return "damaged"
    try:
        there = index.group(group)
        if there is not None and there.members:
            return "context" if strict else "damaged"
        if not chunk_id:
            return "absent"
        if any(difference(other.spec, spec) for other in index.groups_of(chunk_id)):
            return "other_model"
        return "evicted" if catalog.known_chunks((chunk_id,)) else "absent"
    except CacheblendError:  # what can't be read now could not be then
        return "damaged"
