"""Whether an entry can serve what is wanted now, and if not, in what the two differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cache_store.keys import KVSpec
from cache_store.results import EntryInfo

YES = "yes"
OTHER_PREFIX = "other prefix"
OTHER_DTYPE = "other dtype"


def difference(stored: KVSpec, wanted: KVSpec) -> str:
    """What keeps KV from serving: "other model" (its weights or configuration, whatever its
    name), "other tokenizer" or "other dtype"; empty where nothing does."""
    if stored == wanted:
        return ""
    if stored.model != wanted.model:
        return "other model"
    if stored.tokenizer != wanted.tokenizer:
        return "other tokenizer"
    if replace(stored, dtype=wanted.dtype) == wanted:
        return OTHER_DTYPE
    return "other model"


@dataclass(frozen=True)
class Present:
    """What chunks are looked up by now, and the ids that new ones would be computed behind."""

    spec: KVSpec
    context: tuple[int, ...]

    def use_of(self, entry: EntryInfo) -> str:
        """ "yes", "other prefix" for KV that is found and used but isn't exact at the beginning of
        a prompt, or what `difference` says of KV that is not found."""
        if wrong := difference(entry.spec, self.spec):
            return wrong
        if not entry.chunk_id or entry.context == self.context:  # a prefix is what it is
            return YES
        return OTHER_PREFIX
