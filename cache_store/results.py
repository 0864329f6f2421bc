"""What a store answers: frozen, plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_store.keys import KVSpec


@dataclass(frozen=True)
class Match:
    """A stored entry that serves a chunk.

    nbytes: length of its file. shared: leading tokens that its recorded context and the chunk's
    actual one have in common. exact: the two are equal, and so are the regimes. context, regime:
    as recorded.
    """

    key: str
    nbytes: int
    shared: int
    exact: bool
    context: tuple[int, ...]
    regime: str


@dataclass(frozen=True)
class EntryInfo:
    """One stored entry. nbytes: on disk; times in seconds since the epoch; hits: times opened.
    chunk_id: of the chunk's text, empty for the prefix and where the writer gave none; context:
    the ids it was computed behind. saved: by a prompt alone, no ingest has wanted it."""

    key: str
    spec: KVSpec
    tokens: int
    context_tokens: int
    regime: str
    nbytes: int
    stored_at: float
    used_at: float
    hits: int
    chunk_id: str = ""
    context: tuple[int, ...] = ()
    saved: bool = False


@dataclass(frozen=True)
class ModelStats:
    """What is stored for a model in a type. name: as it was when that was ingested, if known."""

    name: str | None
    fingerprint: str
    dtype: str
    entries: int
    nbytes: int


@dataclass(frozen=True)
class StoreStats:
    """A store in numbers. Sizes in bytes; used counts every byte on disk, entry_bytes the chunk
    files alone; saved_entries are those that prompts saved, no ingest; times in seconds since the
    epoch, None without entries."""

    path: str
    limit: int
    eviction: str
    used: int
    entries: int
    saved_entries: int
    chunks: int
    entry_bytes: int
    entry_tokens: int
    documents: int
    pinned_documents: int
    document_chunks: int
    document_tokens: int
    models: tuple[ModelStats, ...]
    hits: int
    oldest_use: float | None
    newest_use: float | None


@dataclass(frozen=True)
class TierStats:
    """A tier in numbers. nbytes: what it holds, limit: what it may; None where that isn't known.
    hits: entries read from it by this process; pending: entries it is still to be given."""

    name: str
    where: str
    nbytes: int | None
    limit: int | None
    hits: int
    pending: int = 0


@dataclass(frozen=True)
class Problem:
    """Something wrong in a store. where: an entry's key, or a path within the store."""

    where: str
    what: str


@dataclass(frozen=True)
class VerifyReport:
    """checked: entries looked at, every byte of them; ok: those without fault; repaired: how many
    problems were done away with."""

    checked: int
    ok: int
    problems: tuple[Problem, ...] = field(default=())
    repaired: int = 0
