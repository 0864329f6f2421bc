"""The store of chunk KV on the local disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cache_store.catalog import CATALOG_NAME, Catalog
from cache_store.counters import Counters
from cache_store.database import guarded, is_writable
from cache_store.entry import (
    EntryHeader,
    EntryReader,
    predicted_file_bytes,
    read_header,
    write_entry,
)
from cache_store.errors import (
    DamagedEntry,
    IntegrityError,
    NotFoundError,
    StoreFullError,
    UsageError,
)
from cache_store.group import Group, ranked, shared_length
from cache_store.index import EntryRow, Index
from cache_store.journal import Journal, journal_files
from cache_store.keys import KVSpec, entry_key, group_key
from cache_store.place import KV_FOLDER, check_limit, default_limit, is_new
from cache_store.results import EntryInfo, Match, Problem, StoreStats, VerifyReport
from cache_store.space import ROW_HEADROOM, Space, round_up
from cache_store.verify import verify_store

__all__ = ["ChunkStore", "EntryInfo", "Match", "Problem", "StoreStats", "VerifyReport"]

_ROW_BYTES = 1536  # an entry's rows in the index, its context aside
_ID_DIGITS = 64


class ChunkStore:
    """One folder with the KV of chunks, behind different contexts and for different models, and
    the catalog of the documents they come from; `journal` is the log of what was audited.

    `open` makes one. Threads and processes may share a store. Methods raise IntegrityError for a
    damaged index, CacheblendError where it is locked or the disk fails. An entry that is damaged
    is never returned: `find` passes over it and says so in `damaged`, `open_entry` raises
    DamagedEntry.
    """

    def __init__(self, path: Path, *, read_only: bool, limit_bytes: int | None) -> None:
        self.path = path
        self.read_only = read_only
        self.damaged: list[str] = []
        self._passed_over: set[str] = set()
        self._index = Index(path / KV_FOLDER, read_only=read_only, size_limit=limit_bytes)
        databases = (self._index.path, path / CATALOG_NAME)
        self._space = Space(path, self._index, databases, journal_files(path))
        try:
            self.catalog = Catalog(
                path / CATALOG_NAME, read_only=read_only, make_room=self._space.make_room
            )
        except BaseException:
            self._index.close()
            raise
        self.counters = Counters(self.catalog, read_only=read_only)
        self.journal = Journal(path, read_only=read_only, make_room=self._space.make_room)

    @classmethod
    def open(
        cls, path: Path | str, *, limit_bytes: int | None = None, read_only: bool = False
    ) -> ChunkStore:
        """Opens the store at `path`; where there is none, makes one.

        limit_bytes: of a new store (`default_limit` if None); one that exists keeps its own.
        A store whose folder cannot be written is opened for reading. Raises NotFoundError where
        there is nothing to read, UsageError for a folder that is something else and for a limit
        too small, IntegrityError for a store that is damaged.
        """
        root = Path(path).expanduser()
        with guarded(root):
            new = is_new(root)
            if new and read_only:
                raise NotFoundError(
                    f"there is no store at {root}", "make one: cacheblend ingest PATH"
                )
            if new:
                limit = default_limit(root) if limit_bytes is None else limit_bytes
                check_limit(limit)
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                Index.prepare(root / KV_FOLDER)
                return cls(root, read_only=False, limit_bytes=limit)
            if not is_writable(root):
                read_only = True
            elif not read_only:
                Index.prepare(root / KV_FOLDER)
                with contextlib.suppress(PermissionError):  # somebody else's, shared on purpose
                    root.chmod(0o700)
            if limit_bytes is None and not read_only:
                limit_bytes = default_limit(root)  # counts only where the index is made anew
        return cls(root, read_only=read_only, limit_bytes=limit_bytes)

    # Finding and reading.

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
        except IntegrityError as error:
            self._report(error)
            return None
        for member in ranked(group.members if group else (), context, regime, strict_context):
            header = self._sound_header(member.key)
            if header is None:
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

    def contains(
        self, spec: KVSpec, token_ids: Sequence[int], context: Sequence[int], regime: str = ""
    ) -> bool:
        """Whether there is a sound entry of this chunk behind exactly this context."""
        key = entry_key(group_key(spec, token_ids), context, regime)
        header = self._sound_header(key)
        return header is not None and header.key == key

    def open_entry(self, key: str) -> EntryReader:
        """An entry's reader; until it is closed the entry isn't evicted by this process.

        Raises NotFoundError where there is no such entry and DamagedEntry where it can't be used.
        """
        try:
            row = self._index.entry(key)
        except IntegrityError as error:
            raise DamagedEntry(error.message, error.hint) from error
        if row is None:
            raise NotFoundError(f"no entry {key[:12]} in the store at {self.path}")
        self._space.hold((key,))
        try:
            reader = EntryReader(row.path, on_close=lambda: self._space.let_go((key,)))
        except BaseException:
            self._space.let_go((key,))
            raise
        if reader.header.key != key:
            reader.close()
            raise DamagedEntry(f"chunk file {row.path.name} holds another chunk")
        if not self.read_only:
            self._index.touch(key)
        return reader

    def _sound_header(self, key: str) -> EntryHeader | None:
        """The header of an entry whose file is there, whole and readable; layers unchecked."""
        if key in self._passed_over:
            return None
        try:
            row = self._index.entry(key)
            return read_header(row.path) if row else None
        except IntegrityError as error:
            # An entry evicted between the two steps isn't damaged.
            if isinstance(error, DamagedEntry) and self._index.entry(key) is None:
                return None
            self._report(error)
            return None

    def _report(self, error: IntegrityError) -> None:
        if error.message not in self.damaged:
            self.damaged.append(error.message)

    # Writing.

    def put(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        regime: str,
        layers: Sequence[tuple[Any, Any]],
        *,
        chunk_id: str = "",
    ) -> str:
        """Stores a chunk's KV in one step and returns its key; nothing happens where it is there.

        layers: for each layer K (before RoPE) and V as C-contiguous little-endian buffers,
        [tokens, kv_heads, head_dim] each, in the spec's dtype. context: the ids it was computed
        behind. chunk_id: of the chunk's text, so that the catalog's chunks lead to their entries.
        Raises StoreFullError where it doesn't fit, even after eviction, UsageError for a store
        open for reading, ValueError for layers of another shape.
        """
        self.require_writable()
        header = EntryHeader(spec, tuple(token_ids), tuple(context), regime, chunk_id)
        key = header.key
        if self._is_there(key):
            self._index.touch(key)
            return key
        staged = self._space.reserve(key, header.file_bytes)
        try:
            with guarded(self.path):
                write_entry(staged.descriptor, header, layers)
                staged.sync()  # the long wait comes before the transaction
            with self._index.transaction():
                if not self._is_there(key):  # else another process was faster
                    self._index.set_entry(key, staged, header.group)
                    self._list(header)
        finally:
            staged.close()
        return key

    def _list(self, header: EntryHeader) -> None:
        """Adds an entry to its group's list, within a transaction."""
        new = Group.of(header)
        try:
            group = self._index.group(header.group)
        except IntegrityError:  # made anew; verify finds the others that were in it
            group = None
        self._index.set_group(header.group, group.with_members_of(new) if group else new)

    def _is_there(self, key: str) -> bool:
        header = self._sound_header(key)
        return header is not None and header.key == key

    def discard(self, key: str) -> int:
        """Removes an entry, damaged or not, and returns the bytes that are free now.

        In a store open for reading it stays, and this process passes over it from now on.
        """
        if self.read_only:
            self._passed_over.add(key)
            return 0
        with self._index.transaction():
            try:
                row = self._index.entry(key)
            except IntegrityError:  # a row we'd never write: it goes, and touches no file
                self._index.delete(key)
                return 0
            if row is None:
                return 0
            self._space.remove(row)
        return row.size

    def protect(self, key: str) -> None:
        """From now on, until this store is closed, its entries' eviction passes over `key`."""
        self._space.hold((key,))

    @contextlib.contextmanager
    def pinned(self, keys: Iterable[str]) -> Iterator[None]:
        """Within, the entries are not evicted by this process."""
        held = tuple(keys)
        self._space.hold(held)
        try:
            yield
        finally:
            self._space.let_go(held)

    def require_writable(self) -> None:
        """Raises UsageError for a store that is open for reading only."""
        if self.read_only:
            raise UsageError(
                f"the store at {self.path} is open for reading only",
                "make its folder writable, or choose another with --store",
            )

    # Sizes.

    @staticmethod
    def predicted_bytes(spec: KVSpec, tokens: int, context_tokens: int = 0) -> int:
        """Bytes on disk that an entry of that many tokens takes, its index rows included."""
        file = predicted_file_bytes(spec, tokens, context_tokens, chunk_id="0" * _ID_DIGITS)
        return round_up(file) + round_up(_ROW_BYTES + 8 * context_tokens)

    def require_room(self, nbytes: int, keep: Iterable[str] = ()) -> None:
        """Whether entries of `nbytes` in all could be here at once, besides those to `keep`.

        To be asked before work that would be in vain. Raises StoreFullError naming the limit
        needed.
        """
        rows = (self._index.entry(key) for key in set(keep))
        kept = sum(row.size for row in rows if row is not None)
        needed = nbytes + kept + self._space.overhead() + ROW_HEADROOM
        if needed > self.limit:
            raise StoreFullError(
                f"the store at {self.path} would need a limit of {needed} bytes; it is "
                f"{self.limit}",
                f"set it: cacheblend store limit {size_with_slack(needed)}",
            )

    def used_bytes(self) -> int:
        """Bytes on disk of everything beneath the store's folder, as `du` counts them."""
        with guarded(self.path):
            return self._space.used()

    @property
    def limit(self) -> int:
        """The size limit in bytes."""
        return self._index.limit

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the limit; a smaller one evicts entries until the store fits.

        Raises UsageError for one below `MIN_LIMIT`, StoreFullError where entries in use leave
        the store larger.
        """
        self.require_writable()
        check_limit(limit_bytes)
        before = self.limit
        self._index.set_limit(limit_bytes)
        try:
            self._space.make_room(0)
        except StoreFullError:
            self._index.set_limit(before)
            raise

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
                )

    def keys_of_chunk(self, chunk_id: str) -> list[str]:
        """Keys of the entries that were stored under the id of a chunk's text."""
        return [m.key for group in self._index.groups_of(chunk_id) for m in group.members]

    def verify(
        self, repair: bool = False, on_bytes: Callable[[int], None] = lambda done: None
    ) -> VerifyReport:
        """Reads every byte of every entry and compares index, files and lists of entries.

        repair: removes damaged entries and files that belong to none, and puts lists right.
        on_bytes: told the bytes of entries read so far.
        """
        if repair:
            self.require_writable()
        return verify_store(
            self.path, self._index, self._space, self.catalog, repair=repair, on_bytes=on_bytes
        )

    def stats(self) -> StoreStats:
        """The store in numbers."""
        entries = list(self.entries())
        documents = self.catalog.documents()
        models = {entry.spec.model for entry in entries}
        return StoreStats(
            path=str(self.path),
            limit=self.limit,
            used=self.used_bytes(),
            entries=len(entries),
            chunks=len({entry.chunk_id for entry in entries} - {""}),
            entry_bytes=sum(entry.nbytes for entry in entries),
            entry_tokens=sum(entry.tokens for entry in entries),
            documents=len(documents),
            document_chunks=sum(document.chunks for document in documents),
            document_tokens=sum(document.tokens for document in documents),
            models=tuple(sorted(self.catalog.model_name(m) or m for m in models)),
            hits=sum(entry.hits for entry in entries),
            oldest_use=min((entry.used_at for entry in entries), default=None),
            newest_use=max((entry.used_at for entry in entries), default=None),
        )

    def close(self) -> None:
        """Writes what was counted, and gives the databases back."""
        self.counters.flush()
        self.catalog.close()
        self._index.close()

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def size_with_slack(needed: int) -> int:
    """A limit to advise: index and catalog grow a little between the advice and the writing."""
    return round_up(needed + needed // 50 + 2**20)
