"""Removes what was chosen by age, use, model, size, or because its document's file is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cache_store.catalog import DocumentInfo
from cache_store.eviction import in_order, policy_of
from cache_store.results import EntryInfo
from cache_store.store import ChunkStore
from cache_store.usable import Present, difference


@dataclass(frozen=True)
class PruneChoice:
    """Which entries go: those that all of these are true of, None and False saying nothing.

    stored_before, used_before: seconds since the epoch. models: fingerprints. present: entries
    that these settings can't use go. sources: of documents; only their own chunks go, which no
    other document has. missing: sources of documents whose files are gone; their own chunks go,
    and the documents. orphans: entries of chunks that no document has. over: bytes; of
    those the others leave, as many go, in the order of eviction, as bring the store down to that.
    """

    stored_before: float | None = None
    used_before: float | None = None
    models: frozenset[str] | None = None
    present: Present | None = None
    sources: frozenset[str] | None = None
    missing: frozenset[str] | None = None
    orphans: bool = False
    over: int | None = None

    @property
    def is_empty(self) -> bool:
        return self == PruneChoice()

    def takes(self, entry: EntryInfo) -> bool:
        """Whether what an entry says of itself chooses it."""
        return not (
            (self.stored_before is not None and entry.stored_at >= self.stored_before)
            or (self.used_before is not None and entry.used_at >= self.used_before)
            or (self.models is not None and entry.spec.model not in self.models)
            or (self.present is not None and not difference(entry.spec, self.present.spec))
        )


@dataclass(frozen=True)
class PrunePlan:
    """entries: in the order in which they go. excess: bytes after which it is enough, None for all
    of them. documents: sources of those that go once their entries are gone. pinned: entries that
    were chosen and stay."""

    entries: tuple[EntryInfo, ...]
    documents: tuple[str, ...]
    excess: int | None
    pinned: int

    def least(self) -> tuple[EntryInfo, ...]:
        """The entries that go where none is in use."""
        if self.excess is None:
            return self.entries
        left, found = self.excess, []
        for entry in self.entries:
            if left <= 0:
                break
            found.append(entry)
            left -= entry.nbytes
        return tuple(found)


@dataclass
class PruneReport:
    """entries, nbytes: removed; documents: sources removed; in_use: entries that were passed over,
    for another process reads or wants them."""

    documents: tuple[str, ...] = ()
    entries: int = 0
    nbytes: int = 0
    in_use: int = 0


def plan_prune(store: ChunkStore, choice: PruneChoice) -> PrunePlan:
    """What there is to remove. Chunks of pinned documents stay, and pinned documents too."""
    documents = store.catalog.documents()
    pinned = _chunks_of(store, (d for d in documents if d.pinned))
    wanted = choice.missing
    if wanted is None or choice.sources is None:
        of = choice.sources if wanted is None else wanted
    else:
        of = wanted = wanted & choice.sources
    missing = [d.source for d in documents if d.source in (wanted or ()) and not d.pinned]
    chosen = [entry for entry in store.entries() if choice.takes(entry)]
    if of is not None:
        own = _chunks_of(store, (d for d in documents if d.source in of))
        own -= _chunks_of(store, (d for d in documents if d.source not in of))
        chosen = [entry for entry in chosen if entry.chunk_id in own]
    if choice.orphans:
        chosen = _orphans(store, chosen)
    loose = [entry for entry in chosen if entry.chunk_id not in pinned]
    excess = None
    if choice.over is not None:
        excess = store.used_bytes() - choice.over
        loose = in_order(loose, policy_of(store.catalog)) if excess > 0 else []
    kept = len(chosen) - len(loose) if excess is None else 0
    return PrunePlan(tuple(loose), tuple(missing), excess, kept)


def prune(store: ChunkStore, plan: PrunePlan) -> PruneReport:
    """Removes the entries, but for those in use, then the documents none of whose own are left."""
    report = PruneReport()
    left = plan.excess
    for entry in plan.entries:
        if left is not None and left <= 0:
            break
        freed = store.discard(entry.key)
        if freed:
            report.entries += 1
            report.nbytes += freed
            left = None if left is None else left - freed
        elif store.has_entry(entry.key):
            report.in_use += 1
    if plan.documents:
        report.documents = _removable(store, plan.documents)
        for source in report.documents:
            store.catalog.remove_document(source)
    return report


def documents_to_go(store: ChunkStore, plan: PrunePlan) -> tuple[str, ...]:
    """The documents that go where no entry is in use."""
    return _removable(store, plan.documents, frozenset(e.key for e in plan.least()))


def _removable(
    store: ChunkStore, sources: tuple[str, ...], gone: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Those of the documents that have no entries of their own but those that are gone."""
    if not sources:
        return ()
    documents = store.catalog.documents()
    others = _chunks_of(store, (d for d in documents if d.source not in sources))
    left = {e.chunk_id for e in store.entries() if e.key not in gone}
    return tuple(
        d.source
        for d in documents
        if d.source in sources and not (_chunks_of(store, iter([d])) - others) & left
    )


def _orphans(store: ChunkStore, entries: list[EntryInfo]) -> list[EntryInfo]:
    """Those of the entries no document has; a prefix, where nothing else of its model is left."""
    known = store.catalog.known_chunks({entry.chunk_id for entry in entries})
    specs = {entry.spec for entry in store.entries() if entry.chunk_id in known}
    return [
        entry
        for entry in entries
        if entry.chunk_id not in known and (entry.chunk_id or entry.spec not in specs)
    ]


def _chunks_of(store: ChunkStore, documents: Iterator[DocumentInfo]) -> set[str]:
    return {c.chunk_id for d in documents for c in store.catalog.chunks(d.source)}
