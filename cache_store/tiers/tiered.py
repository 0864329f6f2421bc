"""A store with tiers: memory above the local disk, a remote below it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cache_store.entry import EntryHeader, EntryReader
from cache_store.errors import CacheblendError, DamagedEntry, IntegrityError, NotFoundError
from cache_store.group import Member, ranked, shared_length
from cache_store.keys import KVSpec, group_key
from cache_store.misses import MissReason
from cache_store.rebuild import OnDamage
from cache_store.results import Match, TierStats
from cache_store.store import ChunkStore
from cache_store.tiers.background import Background, UnderWay
from cache_store.tiers.memory import MemoryTier
from cache_store.tiers.protocol import LostEntry, Reader, RemoteError
from cache_store.tiers.reader import RemoteReader, WatchedReader
from cache_store.tiers.remote import RemoteTier
from cache_store.tiers.transfer import downloads, send
from cache_store.tiers.uploads import Sending, Uploads

CLOSE_SECONDS = 10.0
"""How long `close` waits for what is being uploaded or written down."""

_SETTLE_SECONDS = 1.0  # for a local copy; what waits for a remote isn't waited for
_GIVE_WAY_SECONDS = 5.0  # an upload waits so long, at most, for a prompt that is reading


class TieredStore(ChunkStore):
    """A `ChunkStore` whose entries may also be in memory and at a remote.

    What is on the local disk counts first: the remote is asked only for chunks of which nothing is
    there. A failing remote costs a miss and a line in `take_notes`; it never raises, and nothing of
    it is ever removed for what happens here. `open_tiered` makes one.
    """

    def __init__(self, path: Path, **named: Any) -> None:
        super().__init__(path, **named)
        self.remote: RemoteTier | None = None
        self.memory: MemoryTier | None = None
        self.uploads: Uploads | None = None
        self._background = Background("store-tiers", self._leave_thread)
        self._prompts = UnderWay()
        self._hits = {"disk": 0, "remote": 0}

    def attach(self, *, remote: RemoteTier | None = None, memory_limit: int = 0) -> None:
        """Adds tiers. Before the store is used."""
        self.memory = MemoryTier(memory_limit) if memory_limit else None
        self.remote = remote
        if remote is not None and not self.read_only:
            self.uploads = Uploads(
                self.catalog, self._send, remote.note, remote.has_told, self._leave_thread
            )

    # Finding and reading.

    def look_ahead(
        self, spec: KVSpec, chunks: Iterable[Sequence[int]], seconds: float | None = None
    ) -> None:
        """Begins a prompt: see `ChunkStore.look_ahead`."""
        if self.remote is None:
            return
        self.remote.begin(seconds)
        groups = [group_key(spec, ids) for ids in chunks if len(ids)]
        self.remote.look_ahead(group for group in groups if not self._has_group(group))

    def _has_group(self, group: str) -> bool:
        try:
            found = self._index.group(group)
        except IntegrityError:
            return False
        return found is not None and bool(found.members)

    def find(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        """As `ChunkStore.find`; where nothing is found on the local disk, the remote's best."""
        match = super().find(spec, token_ids, context, regime=regime, strict_context=strict_context)
        if match is not None or self.remote is None:
            return match
        ids = tuple(token_ids)
        entries = {e.header.key: e for e in self.remote.entries(group_key(spec, ids))}
        members = [Member(k, e.header.context, e.header.regime) for k, e in entries.items()]
        for member in ranked(members, context, regime, strict_context):
            header = entries[member.key].header
            if member.key in self._passed_over or (header.spec, header.token_ids) != (spec, ids):
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

    def reason_for_miss(
        self, spec: KVSpec, token_ids: Sequence[int], chunk_id: str, *, strict: bool = False
    ) -> MissReason:
        """As `ChunkStore.reason_for_miss`; `remote` where the remote could not be asked, or did not
        give what it has."""
        reason = super().reason_for_miss(spec, token_ids, chunk_id, strict=strict)
        if self.remote is None or reason not in ("absent", "evicted"):
            return reason
        return "remote" if self.remote.may_have(group_key(spec, token_ids)) else reason

    def open_entry(self, key: str) -> Reader:
        """An entry's reader, from memory, else the disk, else the remote.

        Raises as `ChunkStore.open_entry`, and LostEntry where the remote can't be asked now.
        """
        here = self.has_entry(key)
        there = self.remote.entry(key) if self.remote is not None and not here else None
        if self.memory is not None:
            held = self.memory.open(key) if here or there is not None else None
            if held is not None:
                if here and not self.read_only:
                    self._index.touch(key)
                return held
            if not here:
                self.memory.drop([key])
        if here or self.remote is None:
            return self._local(key)
        if there is None:
            raise LostEntry(f"entry {key[:12]} can't be had from {self.remote.address} now")
        self._hits["remote"] += 1
        self._prompts.begin()
        return RemoteReader(self.remote, there, self._remote_read)

    def _local(self, key: str) -> Reader:
        reader = super().open_entry(key)
        self._hits["disk"] += 1
        if self.memory is None:
            return reader
        self._prompts.begin()
        return WatchedReader(reader, self._disk_read)

    # After a prompt has read an entry.

    def _disk_read(self, reader: Reader, sound: bool) -> None:
        """Takes an entry into memory, in the background, before its file is given back."""
        self._prompts.end()
        if not sound or not self._background.submit(lambda: self._remember(reader)):
            reader.close()

    def _remember(self, reader: Reader) -> None:
        try:
            key = reader.header.key
            if self._background.closing or not self._worth_memory(reader.header):
                return
            with contextlib.suppress(CacheblendError):
                layers = [reader.layer(index) for index in range(reader.header.spec.layers)]
                self._admit(key, reader.header, layers)
        finally:
            reader.close()

    def _worth_memory(self, header: EntryHeader) -> bool:
        if self.memory is None:
            return False
        return self.memory.worth(header.key, once=self._is_one_off(header))

    def _is_one_off(self, header: EntryHeader) -> bool:
        """Whether no document has this chunk, so that a single prompt may have needed it."""
        known = self.catalog.known_chunks([header.chunk_id]) if header.chunk_id else True
        return not known

    def _admit(self, key: str, header: EntryHeader, layers: Sequence[tuple[Any, Any]]) -> bool:
        if self.memory is None:
            return False
        gone = [held for held in self.memory.keys() if not self.has_entry(held)]  # noqa: SIM118
        self.memory.drop(gone)  # evicted from the disk since
        return self.memory.put(key, header, layers)

    def _remote_read(self, reader: RemoteReader) -> None:
        """Writes an entry down locally, in the background."""
        self._prompts.end()
        if not reader.failed and self.remote is not None and self.remote.asked:
            self._background.submit(lambda: self._read_through(reader))

    def _read_through(self, reader: RemoteReader) -> None:
        header = reader.header
        with contextlib.suppress(CacheblendError):  # no room here, or the remote fails: no matter
            layers = reader.complete(lambda: self._background.closing)
            if not self.read_only:
                self._put_local(header, layers, saved=self._is_one_off(header))
                if self._worth_memory(header):
                    self._admit(header.key, header, layers)

    def _put_local(
        self, header: EntryHeader, layers: Sequence[tuple[Any, Any]], *, saved: bool
    ) -> None:
        super().put(
            header.spec,
            header.token_ids,
            header.context,
            header.regime,
            layers,
            chunk_id=header.chunk_id,
            saved=saved,
        )

    def warm(self, keys: Iterable[str]) -> int:
        """Brings entries of the local disk into memory, whatever is there; returns the bytes that
        are held. Entries that can't be read are passed over."""
        for key in keys:
            with (
                contextlib.suppress(IntegrityError, NotFoundError),
                super().open_entry(key) as reader,
            ):
                layers = [reader.layer(index) for index in range(reader.header.spec.layers)]
                self._admit(key, reader.header, layers)
        return self.memory.used if self.memory is not None else 0

    def settle(self, seconds: float | None = None) -> None:
        """Waits for what goes on in the background after prompts."""
        self._background.settle(seconds)

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
        """As `ChunkStore.put`; the remote gets it in the background, unless it is a chunk that a
        prompt saved."""
        uploads = self.uploads
        header = EntryHeader(spec, tuple(token_ids), tuple(context), regime, chunk_id)
        with contextlib.ExitStack() as stack:
            if uploads is not None and not (saved and (chunk_id or context)):
                stack.enter_context(uploads.adding(header.key))
            return super().put(
                spec, token_ids, context, regime, layers, chunk_id=chunk_id, saved=saved
            )

    def announce(self, keys: Iterable[str]) -> None:
        """Entries that another process of ours stored here: the remote gets them too."""
        if self.uploads is not None:
            self.uploads.add(keys)
            self.uploads.start()

    def discard(self, key: str) -> int:
        """As `ChunkStore.discard`. The remote keeps its own: others share it."""
        if self.memory is not None:
            self.settle(_SETTLE_SECONDS)  # one that is being taken into memory is in use
            self.memory.drop([key])
        return super().discard(key)

    def _send(self, key: str) -> Sending:
        """Gives the remote an entry. Raises RemoteError."""
        assert self.remote is not None
        self._prompts.wait_for_none(_GIVE_WAY_SECONDS)
        with self.pinned([key]), contextlib.suppress(IntegrityError):  # damage isn't passed on
            row = self._index.entry(key)
            if row is not None:  # else evicted since; who needs it computes it
                with EntryReader(row.path) as reader:
                    if not send(self.remote, reader):
                        return "there"
                    self.counters.add("remote.uploaded")
                    return "sent"
        return "gone"

    def push(
        self, *, everything: bool = False, on_left: Callable[[int], None] = lambda left: None
    ) -> int:
        """Uploads what is still to be uploaded, or everything; how many entries are left.

        Raises RemoteError where the remote fails.
        """
        if self.uploads is None:
            return 0
        if everything:
            self.uploads.add(entry.key for entry in self.entries())
        self.uploads.retry()
        left = self.uploads.wait(on_left=on_left)
        if left and self.uploads.failure is not None:
            raise self.uploads.failure
        return left

    # From the remote to the local disk.

    def bring(
        self,
        wanted: Sequence[tuple[str, str]],
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> set[str]:
        """See `ChunkStore.bring`: downloads what only the remote has."""
        here = {key for _, key in wanted if self._is_there(key)}
        if self.remote is None or self.read_only:
            return here
        self.remote.begin()
        lacking = [place for place in wanted if place[1] not in here]
        self.remote.look_ahead((group for group, _ in lacking), headers=False)
        found = [place for place in lacking if self.remote.lists(*place)]
        done = 0
        for (_, key), future in downloads(self.remote, found if self.remote.asked else []):
            try:
                header, layers = future.result()
            except RemoteError as error:
                self.remote.gave_up(error)
                continue
            except LostEntry:
                continue
            except DamagedEntry:
                self.remote.damaged(key)
                continue
            self._put_local(header, layers, saved=False)
            self.protect(key)
            self.counters.add("remote.downloaded")
            here.add(key)
            done += header.file_bytes
            self.remote.bytes_read += header.file_bytes
            on_bytes(done)
        return here

    # What is told, and the end.

    def take_notes(self) -> list[str]:
        """See `ChunkStore.take_notes`."""
        return self.remote.take_notes() if self.remote is not None else []

    def tiers(self) -> list[TierStats]:
        """The tiers, the nearest first."""
        found = []
        if self.memory is not None:
            memory = self.memory
            found.append(TierStats("memory", "", memory.used, memory.limit, memory.hits))
        hits = self._hits
        found.append(TierStats("disk", str(self.path), self.used_bytes(), self.limit, hits["disk"]))
        if self.remote is not None:
            pending = self.uploads.pending() if self.uploads is not None else 0
            where = self.remote.address
            found.append(TierStats("remote", where, None, None, hits["remote"], pending))
        return found

    def _leave_thread(self) -> None:
        """Gives back what the index keeps for the calling thread."""
        if not self.read_only:
            with contextlib.suppress(CacheblendError):
                self._index.close()

    def close(self) -> None:
        """Waits, not for long, for what is being written or uploaded; what is left of that is noted
        in `take_notes` and done by the next process that writes."""
        self._background.close(CLOSE_SECONDS)
        if self.uploads is not None:
            self.uploads.close(CLOSE_SECONDS)
        if self.remote is not None:
            self.remote.close()
        if self.memory is not None:
            self.memory.clear()
        super().close()


def open_tiered(
    path: Path | str,
    *,
    remote: Callable[[], RemoteTier] | None = None,
    memory_limit: int = 0,
    limit_bytes: int | None = None,
    read_only: bool = False,
    on_damage: OnDamage = "raise",
) -> TieredStore:
    """Opens the store at `path` as `ChunkStore.open` does, with these tiers. Nothing is sent to the
    remote yet. remote: makes its tier; memory_limit: bytes, 0 for no tier of memory."""
    tier = remote() if remote is not None else None
    try:
        store = TieredStore.open(
            path, limit_bytes=limit_bytes, read_only=read_only, on_damage=on_damage
        )
    except BaseException:
        if tier is not None:
            tier.close()
        raise
    store.attach(remote=tier, memory_limit=memory_limit)
    return store
