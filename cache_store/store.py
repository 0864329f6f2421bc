"""The store of chunk KV on the local disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from cache_store.database import BUSY_SECONDS, READ_SECONDS, guarded, is_writable
from cache_store.disk import StagedFile
from cache_store.entry import EntryHeader, EntryReader, predicted_file_bytes, write_entry
from cache_store.errors import (
    DamagedDatabase,
    DamagedEntry,
    IntegrityError,
    StoreBusy,
    StoreFullError,
    UsageError,
    no_store,
)
from cache_store.eviction import check_policy, set_policy
from cache_store.group import Group
from cache_store.index import Index
from cache_store.keeping import KeepingStore
from cache_store.keys import KVSpec
from cache_store.lease import lease_bytes
from cache_store.place import KV_FOLDER, check_limit, default_limit, first_limit, is_new
from cache_store.rebuild import Check, OnDamage, as_problem, is_lost, mend
from cache_store.receiving import receive_entry
from cache_store.results import EntryInfo, Match, Problem, StoreStats, VerifyReport
from cache_store.space import ROW_HEADROOM, round_up
from cache_store.verify import verify_files, verify_store

__all__ = ["ChunkStore", "EntryInfo", "Match", "Problem", "StoreStats", "VerifyReport"]

_ROW_BYTES = 1536  # an entry's rows in the index, its context aside
_ID_DIGITS = 64


class ChunkStore(KeepingStore):
    """One folder with the KV of chunks, behind different contexts and for different models, and
    the catalog of the documents they come from; `journal` is the log of what was audited.

    `open` makes one. Threads and processes may share a store. Methods raise IntegrityError for a
    damaged index, CacheblendError where it is locked or the disk fails. An entry that is damaged
    is never returned: `find` passes over it and says so in `damaged`, `open_entry` raises
    DamagedEntry.
    """

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        limit_bytes: int | None = None,
        read_only: bool = False,
        on_damage: OnDamage = "raise",
    ) -> Self:
        """Opens the store at `path`; where there is none, makes one.

        limit_bytes: of a new store (`default_limit` if None); one that exists keeps its own.
        A store whose folder cannot be written is opened for reading. on_damage: what to do about
        an index or a catalog that is damaged; "go_on": without it, reading only, and without what
        stays locked for two seconds too (`faults` says so); "mend": make it anew (`mended`).
        Raises NotFoundError where there is nothing to read, or what there is was never finished,
        UsageError for a folder that is something else and for a limit too small, IntegrityError
        for a store that is damaged.
        """
        root = Path(path).expanduser()
        with guarded(root):
            new = is_new(root)
            if new and read_only:
                raise no_store(root)
            if new:
                limit = first_limit(root) if limit_bytes is None else limit_bytes
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
        going_on = on_damage == "go_on"
        mended: list[Problem] = []
        if not read_only and (on_damage == "mend" or (not going_on and is_lost(root))):
            check: Check = "quick_check" if on_damage == "mend" else "none"
            mended = mend(root, limit=limit_bytes, check=check)
        return cls(
            root,
            read_only=read_only,
            limit_bytes=limit_bytes,
            going_on=going_on,
            mended=mended,
        )

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
        saved: bool = False,
    ) -> str:
        """Stores a chunk's KV in one step and returns its key; nothing happens where it is there.

        layers: for each layer K (before RoPE) and V as C-contiguous little-endian buffers,
        [tokens, kv_heads, head_dim] each, in the spec's dtype. context: the ids it was computed
        behind. chunk_id: of the chunk's text, so that the catalog's chunks lead to their entries.
        saved: for one prompt, not ingested; it pushes out nothing but its like, and goes first
        where room is needed, unless it has neither context nor id, as the prefix. One that is put
        without it, or protected, is such no longer.
        Raises StoreFullError where it doesn't fit, even after eviction, UsageError for a store
        open for reading, ValueError for layers of another shape.
        """
        self.require_writable()
        header = EntryHeader(spec, tuple(token_ids), tuple(context), regime, chunk_id)
        key, one_off = header.key, saved and bool(chunk_id or context)
        if self._is_there(key):
            self._index.touch(key)
            if not saved:
                self._promote(key)
            return key
        staged = self._space.reserve(key, header.file_bytes, self._list_bytes(header), saved=saved)
        try:
            with guarded(self.path):
                write_entry(staged.descriptor, header, layers)
                staged.sync()  # the long wait comes before the transaction
            self._publish(staged, header, one_off)
        finally:
            staged.close()
        return key

    def adopt(self, key: str, size: int, checksum: bytes, pieces: Iterable[bytes]) -> None:
        """Takes in a chunk file as it comes from elsewhere; nothing happens where it is there.

        size: of the file, whose room is reserved first. checksum: of its header. pieces: its bytes.
        Raises DamagedEntry, and stores nothing, where they are not the chunk file of that key with
        all its layers; StoreFullError and UsageError as `put` does, and whatever `pieces` raises.
        """
        self.require_writable()
        if self._is_there(key):
            self._promote(key)
            return
        staged = self._space.reserve(key, size)
        try:
            header = receive_entry(staged, pieces, checksum)
            if header.key != key:
                raise DamagedEntry("it is the chunk file of another key")
            with self._space.claim(self._list_bytes(header)):
                self._publish(staged, header, saved=False)
        finally:
            staged.close()

    def _publish(self, staged: StagedFile, header: EntryHeader, saved: bool) -> None:
        """Puts a chunk file that is written in place, and lists it."""
        key = header.key
        with contextlib.ExitStack() as stack, self._index.transaction():
            if not self._is_there(key):  # else another process was faster
                stack.enter_context(self._space.parting(self._replaced(key)))
                self._index.set_entry(key, staged, header.group, saved)
                self._list(header)
        self._passed_over.discard(key)  # it's another file now

    def _replaced(self, key: str) -> int:
        """Bytes of a damaged entry that is about to be replaced."""
        with contextlib.suppress(IntegrityError):
            row = self._index.entry(key)
            return row.size if row is not None else 0
        return 0

    def _list_bytes(self, header: EntryHeader) -> int:
        """Bytes that the log may grow by for the group's list: it is written whole."""
        with contextlib.suppress(IntegrityError):
            group = self._index.group(header.group)
            return 2 * len((group or Group.of(header)).encode()) + 16 * len(header.context)
        return 0

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

        One that somebody reads or that another process's ingest wants stays, and so does every one
        in a store open for reading; this process passes over it from now on.
        """
        if self.read_only:
            self._passed_over.add(key)
            return 0
        patience = READ_SECONDS if self._going_on else BUSY_SECONDS
        try:
            with contextlib.ExitStack() as stack, self._index.transaction(patience=patience):
                try:
                    row = self._index.entry(key)
                except DamagedDatabase:
                    raise
                except IntegrityError:  # a row we'd never write: it goes, and touches no file
                    self._index.delete(key)
                    return 0
                if row is None:
                    return 0
                self._damaged_groups.add(row.group)  # who looks for it now knows why it's gone
                if not self._space.discard(row, stack):
                    self._passed_over.add(key)
                    return 0
        except (DamagedDatabase, StoreBusy):
            if not self._going_on:
                raise
            self._passed_over.add(key)
            return 0
        return row.size

    def discard_damaged(self, key: str) -> bool:
        """Removes an entry that is damaged in any byte, whoever uses it; False where it is sound
        (another process may have stored it anew meanwhile) and where there is none."""
        with contextlib.ExitStack() as stack, self._index.transaction():
            row = self._index.entry(key)
            if row is None:
                return False
            with contextlib.suppress(DamagedEntry), EntryReader(row.path) as reader:
                reader.verify()
                if reader.header.key == key:
                    return False
            stack.enter_context(self._space.parting(row.size))
            self._space.remove(row)
        return True

    def relist(self, key: str) -> bool:
        """Puts a sound entry into its group's list, which may be damaged; False for another."""
        header = self.header(key)
        if header is not None:
            with self._index.transaction():
                self._list(header)
        return header is not None

    def bring(
        self,
        wanted: Sequence[tuple[str, str]],
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> set[str]:
        """Keys of those of the entries, given by group and key, that are on the local disk, once a
        store with a remote has downloaded what that has of them. on_bytes: told the bytes so far.
        Raises StoreFullError."""
        return {key for _, key in wanted if self._is_there(key)}

    def announce(self, keys: Iterable[str]) -> None:
        """Tells of entries that another process of ours stored here: a remote gets them too."""

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
        keep = set(keep)
        kept = self._space.kept_bytes(keep) + lease_bytes(len(keep))
        needed = nbytes + kept + self._space.overhead() + ROW_HEADROOM
        if needed > self.limit:
            raise StoreFullError(
                f"the store at {self.path} would need a limit of {needed} bytes; it is "
                f"{self.limit}",
                f"set it: cacheblend store limit {size_with_slack(needed)}",
            )

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the limit; a smaller one evicts entries until the store fits.

        Raises UsageError for one below `MIN_LIMIT`, StoreFullError where entries in use leave
        the store larger.
        """
        self.require_writable()
        check_limit(limit_bytes)
        self._space.make_room(0, limit_bytes)  # before it holds: it is never exceeded
        before = self.limit
        self._index.set_limit(limit_bytes)
        try:
            self._space.make_room(0)  # what others wrote meanwhile
        except StoreFullError:
            self._index.set_limit(before)
            raise

    def set_eviction(self, policy: str) -> None:
        """Sets, for every process, which entries go first where room is needed: "lru" those used
        longest ago, "lfu" those used least (uses count half after a week), "none" none: what
        doesn't fit is refused. Raises UsageError for another."""
        wanted = check_policy(policy)
        self.require_writable()
        set_policy(self.catalog, wanted)

    # Looking over the whole.

    def verify(
        self, repair: bool = False, on_bytes: Callable[[int], None] = lambda done: None
    ) -> VerifyReport:
        """Reads every byte of every entry and compares index, files and lists of entries.

        repair: makes damaged databases anew, removes damaged entries and files that belong to
        none, and puts lists right. What was mended when the store was opened is told of, too.
        on_bytes: told the bytes of entries read so far.
        """
        mended, self.mended = list(self.mended), ()
        if repair:
            self.require_writable()
            mended += mend(self.path, check="integrity_check")
        faults: list[Problem] = []
        for fault in self.faults:
            if not isinstance(fault, DamagedDatabase):
                raise fault
            faults.append(as_problem(fault))
        if faults:  # nothing else can be asked of a damaged database
            return verify_files(self.path, faults, on_bytes)
        found = verify_store(
            self.path, self._index, self._space, self.catalog, repair=repair, on_bytes=on_bytes
        )
        return replace(
            found,
            problems=(*mended, *found.problems),
            repaired=len(mended) + found.repaired,
        )


def size_with_slack(needed: int) -> int:
    """A limit to advise: index and catalog grow a little between the advice and the writing."""
    return round_up(needed + needed // 50 + 2**20)
