"""Finding and reading what a store holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cache_store.catalog import CATALOG_NAME, Catalog
from cache_store.counters import Counters
from cache_store.database import READ_SECONDS, guarded
from cache_store.entry import EntryHeader, EntryReader, read_header
from cache_store.errors import (
    CacheblendError,
    DamagedDatabase,
    DamagedEntry,
    IntegrityError,
    NoSpace,
    NotFoundError,
    StoreBusy,
    UnreadableEntry,
)
from cache_store.eviction import Policy
from cache_store.group import Group, ranked, shared_length
from cache_store.index import EntryRow, Index
from cache_store.journal import Journal, journal_files
from cache_store.keys import KVSpec, entry_key, group_key
from cache_store.locks import folder_lock
from cache_store.misses import MissReason, reason_for_miss
from cache_store.pins import Pins
from cache_store.place import KV_FOLDER
from cache_store.rebuild import index_fault, lost_catalog
from cache_store.results import EntryInfo, Match, ModelStats, Problem, StoreStats
from cache_store.space import Space
from cache_store.tiers.protocol import Reader


class ReadableStore:
    """The part of `cache_store.store.ChunkStore` that changes nothing but the notes on what was
    used; see there."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool,
        limit_bytes: int | None,
        going_on: bool = False,
        mended: Sequence[Problem] = (),
    ) -> None:
        """going_on: without what is damaged or locked; see `faults`. mended: what was damaged."""
        self.path = path
        self.read_only = read_only
        self.damaged: list[str] = []
        self.faults: list[CacheblendError] = []
        self.mended = tuple(mended)
        self._going_on = going_on
        self._passed_over: set[str] = set()
        self._damaged_groups: set[str] = set()  # whose entries were met and can't be used
        self._index = self._open_index(limit_bytes)
        databases = (self._index.path, path / CATALOG_NAME)
        self._space = Space(path, self._index, databases, journal_files(path))
        try:
            self.catalog = self._open_catalog()
        except BaseException:
            self._index.close()
            raise
        self.pins = Pins(self.catalog)
        self.counters = Counters(self.catalog, read_only=self.read_only)
        self.journal = Journal(path, read_only=self.read_only, claim=self._space.claim)
        self._space.use(self.catalog, self._count_evicted)

    def _open_index(self, limit_bytes: int | None) -> Index:
        kv = self.path / KV_FOLDER
        if not self._going_on:
            return Index(kv, read_only=self.read_only, size_limit=limit_bytes)
        try:
            if fault := index_fault(self.path, patience=READ_SECONDS):
                raise fault
            if not self.read_only:
                try:
                    # A limit, too: a crash may have left an index that was never written.
                    limit = limit_bytes
                    return Index(kv, read_only=False, size_limit=limit, patience=READ_SECONDS)
                except (StoreBusy, NoSpace) as error:  # it can be read all the same
                    self._do_without(error)
            return Index(kv, read_only=True, patience=READ_SECONDS)
        except (DamagedDatabase, StoreBusy) as error:
            self._do_without(error)
            return Index.stand_in(kv)

    def _open_catalog(self) -> Catalog:
        path, claim = self.path / CATALOG_NAME, self._space.claim
        if not self._going_on:
            self._require_catalog()
            return Catalog(path, read_only=self.read_only, claim=claim)
        try:
            self._require_catalog()
            try:
                return Catalog(path, read_only=self.read_only, claim=claim, patience=READ_SECONDS)
            except NoSpace as error:
                self._do_without(error)
                return Catalog(path, read_only=True, patience=READ_SECONDS)
        except (DamagedDatabase, StoreBusy) as error:
            self._do_without(error)
            return Catalog.stand_in(path, error)

    def _require_catalog(self) -> None:
        """Raises DamagedDatabase where it is lost: a new one would make all KV that of no text."""
        if lost_catalog(self.path) and self._index.has_chunks():
            with guarded(self.path), folder_lock(self.path, alone=False):  # nobody begins it anew
                lost = lost_catalog(self.path)
            if lost:
                raise lost

    def without(self, fault: CacheblendError) -> str:
        """What a fault means for who goes on in spite of it."""
        if isinstance(fault, DamagedDatabase) and CATALOG_NAME in fault.message:
            return "the documents' texts are lost"
        if isinstance(fault, NoSpace):
            return "nothing is stored"
        if isinstance(fault, StoreBusy) and not self._index.is_stand_in:
            return "nothing is stored until it is free"
        return "no stored KV is used, nothing is stored"

    def _do_without(self, error: CacheblendError) -> None:
        """Nothing is written to a store that isn't whole."""
        self.faults.append(error)
        self.read_only = True

    def _count_evicted(self, entries: int, nbytes: int) -> None:
        self.counters.add("eviction", entries)
        self.counters.add("eviction.bytes", nbytes)

    # Finding and reading.

    def look_ahead(
        self, spec: KVSpec, chunks: Iterable[Sequence[int]], seconds: float | None = None
    ) -> None:
        """Says, before a prompt, which chunks (token ids) will be looked for: a store with a remote
        asks for all of them at once. seconds: to be waited for a remote in all; None: as set."""

    def find(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        """The entry that fits a chunk best, or None.

        context: all token ids before the chunk in the prompt. An exact entry is preferred, then
        the longest shared context. strict_context: entries computed behind any other context are
        refused. Damaged entries are passed over and named in `damaged`.
        """
        ids = tuple(token_ids)
        group_id = group_key(spec, ids)
        try:
            group = self._index.group(group_id)
        except (IntegrityError, StoreBusy) as error:
            self._damaged_groups.add(group_id)
            self._report(error)
            return None
        for member in ranked(group.members if group else (), context, regime, strict_context):
            header = self._sound_header(member.key)
            if header is None:
                if self.has_entry(member.key):  # not evicted just now
                    self._damaged_groups.add(group_id)
                continue
            found = (header.spec, header.token_ids, header.context, header.regime)
            if found != (spec, ids, member.context, member.regime):
                self._report(DamagedEntry(f"entry {member.key[:12]} holds another chunk"))
                continue
            return Match(
                key=member.key,
                nbytes=header.file_bytes,
                shared=shared_length(member.context, context),
                exact=member.regime == regime and member.context == tuple(context),
                context=member.context,
                regime=member.regime,
            )
        return None

    def find_here(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        """As `find`, without asking a remote."""
        return ReadableStore.find(
            self, spec, token_ids, context, regime=regime, strict_context=strict_context
        )

    def reason_for_miss(
        self, spec: KVSpec, token_ids: Sequence[int], chunk_id: str, *, strict: bool = False
    ) -> MissReason:
        """Why `find` had nothing for a chunk; see `cache_store.misses`."""
        group = group_key(spec, token_ids)
        damaged = group in self._damaged_groups
        return reason_for_miss(
            self._index, self.catalog, spec, group, chunk_id, damaged=damaged, strict=strict
        )

    def contains(
        self, spec: KVSpec, token_ids: Sequence[int], context: Sequence[int], regime: str = ""
    ) -> bool:
        """Whether there is a sound entry of this chunk behind exactly this context."""
        key = entry_key(group_key(spec, token_ids), context, regime)
        header = self._sound_header(key)
        return header is not None and header.key == key

    def has_entry(self, key: str) -> bool:
        """Whether the index has a row of an entry, be it one that can't be read."""
        try:
            return self._index.entry(key) is not None
        except IntegrityError:
            return True

    def open_entry(self, key: str) -> Reader:
        """An entry's reader; until it is closed the entry isn't removed by any process.

        Raises NotFoundError where there is no such entry and DamagedEntry where it can't be used.
        """
        reader = self.peek(key)
        if not self.read_only:
            self._index.touch(key)
        return reader

    def peek(self, key: str) -> EntryReader:
        """As `open_entry`, without counting as a use."""
        while True:
            try:
                file = self._index.file_of(key)
            except (IntegrityError, StoreBusy) as error:
                if isinstance(error, StoreBusy) and not self._going_on:
                    raise
                raise DamagedEntry(error.message, error.hint) from error
            if file is None:
                raise NotFoundError(f"no entry {key[:12]} in the store at {self.path}")
            self._space.hold((key,))
            try:
                reader = EntryReader(Path(file), on_close=lambda: self._space.let_go((key,)))
                break
            except BaseException as error:
                self._space.let_go((key,))
                if not isinstance(error, DamagedEntry) or self._index.file_of(key) == file:
                    raise  # else it went or was replaced between the two steps
        if reader.header.key != key:
            reader.close()
            raise DamagedEntry(f"chunk file {reader.path.name} holds another chunk")
        return reader

    def header(self, key: str) -> EntryHeader | None:
        """What an entry says of itself, its file being there and whole; layers unchecked. None
        where there is no such entry, or it can't be used."""
        found = self._sound_header(key)
        return found if found is not None and found.key == key else None

    def _sound_header(self, key: str) -> EntryHeader | None:
        """The header of an entry whose file is there, whole and readable; layers unchecked."""
        if key in self._passed_over:
            return None
        try:
            file = self._index.file_of(key)
            return read_header(file) if file else None
        except (IntegrityError, StoreBusy, UnreadableEntry) as error:
            # An entry evicted between the two steps isn't damaged.
            if isinstance(error, DamagedEntry) and self._index.entry(key) is None:
                return None
            self._report(error)
            return None

    def _report(self, error: CacheblendError) -> None:
        if isinstance(error, StoreBusy) and not self._going_on:
            raise error
        if error.message not in self.damaged:
            self.damaged.append(error.message)

    def note_uses(self) -> None:
        """Writes down which entries were used, for every process; for after a prompt's answer."""
        if not self.read_only:
            self._index.flush()

    def pending_uploads(self) -> int:
        """How many entries a remote store is still to be given."""
        return int(self.catalog.ask("SELECT count(*) FROM upload")[0][0])

    def take_notes(self) -> list[str]:
        """What the user should be told since the last time, such as of a remote that failed."""
        return []

    # Looking over the whole.

    def entries(self) -> Iterator[EntryInfo]:
        """All entries, in the order they were stored; rows that can't be read are left out."""
        if not self.read_only:
            self._index.flush()
        groups = {key: group for key, group in self._index.groups() if isinstance(group, Group)}
        for row in self._index.entries():
            if not isinstance(row, EntryRow) or (group := groups.get(row.group)) is None:
                continue
            member = next((m for m in group.members if m.key == row.key), None)
            if member is not None:
                yield EntryInfo(
                    key=row.key,
                    spec=group.spec,
                    tokens=group.tokens,
                    context_tokens=len(member.context),
                    regime=member.regime,
                    nbytes=row.size,
                    stored_at=row.stored_at,
                    used_at=row.used_at,
                    hits=row.hits,
                    chunk_id=group.chunk_id,
                    saved=row.saved,
                    context=member.context,
                )

    def keys_of_chunk(self, chunk_id: str) -> list[str]:
        """Keys of the entries that were stored under the id of a chunk's text."""
        return [m.key for group in self._index.groups_of(chunk_id) for m in group.members]

    def give_way(self, nbytes: int) -> list[str]:
        """Removes the files of the first entries to be evicted, where the disk has no room to
        write that down; see `Eviction.give_way`."""
        return self._space.eviction.give_way(nbytes)

    def used_bytes(self) -> int:
        """Bytes on disk of everything beneath the store's folder, as `du` counts them."""
        with guarded(self.path):
            return self._space.used()

    @property
    def limit(self) -> int:
        """The size limit in bytes."""
        return self._index.limit

    @property
    def eviction(self) -> Policy:
        """Which entries go first where room is needed: "lru", "lfu" or "none"."""
        return self._space.eviction.policy

    def stats(self) -> StoreStats:
        """The store in numbers."""
        entries = list(self.entries())
        documents = self.catalog.documents()
        kinds: dict[tuple[str, str], list[int]] = {}
        for entry in entries:
            kinds.setdefault((entry.spec.model, entry.spec.dtype), []).append(entry.nbytes)
        return StoreStats(
            path=str(self.path),
            limit=self.limit,
            eviction=self.eviction,
            used=self.used_bytes(),
            entries=len(entries),
            saved_entries=sum(entry.saved for entry in entries),
            chunks=len({entry.chunk_id for entry in entries} - {""}),
            entry_bytes=sum(entry.nbytes for entry in entries),
            entry_tokens=sum(entry.tokens for entry in entries),
            documents=len(documents),
            pinned_documents=sum(document.pinned for document in documents),
            document_chunks=sum(document.chunks for document in documents),
            document_tokens=sum(document.tokens for document in documents),
            models=tuple(
                ModelStats(self.catalog.model_name(model), model, dtype, len(sizes), sum(sizes))
                for (model, dtype), sizes in sorted(kinds.items())
            ),
            hits=sum(entry.hits for entry in entries),
            oldest_use=min((entry.used_at for entry in entries), default=None),
            newest_use=max((entry.used_at for entry in entries), default=None),
        )

    def close(self) -> None:
        """Writes what was counted, and gives the databases back."""
        self._space.lease.close()
        self.counters.flush()
        self.catalog.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
