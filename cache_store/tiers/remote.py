"""The remote tier: entries of a `Remote`, found and read without ever waiting long."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import TypeVar

from cache_store.entry import EntryHeader, header_length, parse_header
from cache_store.errors import DamagedEntry
from cache_store.tiers.breaker import Breaker
from cache_store.tiers.naming import entry_name, group_and_key, group_prefix
from cache_store.tiers.protocol import Bytes, Head, Remote, RemoteError, RemoteRefused
from cache_store.tiers.waiting import Patience

UPLOAD_TIMEOUT = 30.0
"""Seconds for one answer where no prompt waits for it."""

PROMPT_TIMEOUTS = 4
"""How many times the time-out a prompt may wait in all, where nothing better is known."""

_FIRST_READ = 2**14  # as much as nearly every header takes
_MAX_HEADER = 2**24
_THREADS = 16
_KNOWN_SECONDS = 60.0  # for how long a group's list counts
_KNOWN_GROUPS = 100_000
_KNOWN_HEADERS = 4096
_MAX_CONTEXTS = 16  # entries of a group that are looked at
_MOST_DAMAGED = 2  # in one prompt: such a remote isn't asked any more

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RemoteEntry:
    """An entry that the remote has, as far as its header goes."""

    name: str
    header: EntryHeader


class RemoteTier:
    """Finds and reads entries. Threads may share it.

    `begin` starts a prompt: from then on waiting for the remote is limited in all, and where an
    answer fails the remote isn't asked again until the next `begin`. What went wrong is in `notes`.
    connect: makes a connection with a time-out in seconds.
    """

    def __init__(
        self,
        connect: Callable[[float], Remote],
        timeout: float,
        *,
        breaker: Breaker | None = None,
    ) -> None:
        self.timeout = timeout
        self.breaker = breaker or Breaker()
        self.patience = Patience(PROMPT_TIMEOUTS * timeout)
        self.remote = connect(timeout)
        self.slow = connect(max(timeout, UPLOAD_TIMEOUT))
        self.address = self.remote.address
        self.bytes_read = 0
        self.failures = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote-read")
        self._lock = threading.Lock()
        self._off = False
        self._notes: dict[str, None] = {}
        self._told: set[str] = set()
        self._groups: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()
        self._headers: OrderedDict[str, RemoteEntry] = OrderedDict()
        self._damaged: set[str] = set()
        self._damaged_now = 0

    # A prompt.

    def begin(self, seconds: float | None = None) -> None:
        """A new prompt, which may wait `seconds` in all."""
        default = PROMPT_TIMEOUTS * self.timeout
        self.patience.renew(default if seconds is None else seconds)
        with self._lock:
            self._off, self._damaged_now = False, 0

    @property
    def asked(self) -> bool:
        """Whether the remote is asked for anything now."""
        with self._lock:
            return not self._off

    def note(self, text: str) -> None:
        """Something the user should be told, once."""
        with self._lock:
            self._notes[text] = None

    def has_told(self, why: str) -> bool:
        """Whether `notes` had it that the remote was done without for this reason."""
        with self._lock:
            return why in self._told

    def take_notes(self) -> list[str]:
        """What has been noted since the last time."""
        with self._lock:
            notes, self._notes = list(self._notes), {}
            return notes

    def gave_up(self, error: RemoteError) -> None:
        """An answer failed: for this prompt it was the last."""
        if isinstance(error, RemoteRefused):
            self.breaker.worked()  # it is there
        else:
            self.breaker.failed()
        self.stop(error.message)

    def stop(self, why: str) -> None:
        """Asks the remote nothing more for this prompt."""
        self.failures += 1
        with self._lock:
            self._off = True
            self._told.add(why)
            self._notes[f"{why.rstrip('.')}; the remote store was done without"] = None

    # Asking.

    def submit(self, action: Callable[[], _Result]) -> Future[_Result]:
        return self._pool.submit(action)

    def wait(self, future: Future[_Result], longest: float | None = None) -> _Result:
        """What `submit` comes to, within what waiting the prompt has left. Raises RemoteError."""
        with self.patience.waiting():
            left = self.patience.left
            try:
                result = future.result(left if longest is None else min(left, longest))
            except (Late, CancelledError):  # cancelled by another thread for which it was late
                future.cancel()
                late = RemoteError(f"{self.address} was too slow")
                self.gave_up(late)
                raise late from None
            except RemoteError as error:
                self.gave_up(error)
                raise
        self.breaker.worked()
        return result

    def _may_ask(self) -> bool:
        if not self.asked:
            return False
        if not self.breaker.allows():
            rest = self.breaker.rests_for
            self.stop(f"{self.address} failed; it is asked again in {rest:.0f} s")
            return False
        return True

    # Finding.

    def look_ahead(self, groups: Iterable[str], *, headers: bool = True) -> None:
        """Learns of all these groups at once what will be asked of each. Failing, says nothing:
        they count as empty for this prompt."""
        wanted = list(dict.fromkeys(groups))
        unknown = [group for group in wanted if self._listed(group) is None]
        if not unknown and not (headers and self._unread(wanted)):
            return
        if not self._may_ask():
            return
        try:
            if unknown:
                prefixes = [group_prefix(group) for group in unknown]
                self._list(unknown, self.wait(self.submit(lambda: self.remote.names(prefixes))))
            if headers and (names := self._unread(wanted)):
                self._read(names, self.wait(self.submit(lambda: self._headers_of(names))))
        except RemoteError:
            return

    def _listed(self, group: str) -> tuple[str, ...] | None:
        with self._lock:
            found = self._groups.get(group)
        fresh = found is not None and time.monotonic() - found[0] < _KNOWN_SECONDS
        return found[1] if found is not None and fresh else None

    def _list(self, groups: Sequence[str], names: Sequence[Sequence[str]]) -> None:
        now = time.monotonic()
        with self._lock:
            for group, found in zip(groups, names, strict=True):
                pairs = [pair for name in found if (pair := group_and_key(name)) is not None]
                keys = tuple(key for of, key in pairs if of == group)
                self._groups[group] = (now, keys)
                self._groups.move_to_end(group)
            while len(self._groups) > _KNOWN_GROUPS:
                self._groups.popitem(last=False)

    def _unread(self, groups: Iterable[str]) -> list[str]:
        """Names of entries of these groups whose headers aren't known."""
        names: list[str] = []
        for group in groups:
            for key in (self._listed(group) or ())[:_MAX_CONTEXTS]:
                with self._lock:
                    if key not in self._headers and key not in self._damaged:
                        names.append(entry_name(group, key))
        return names

    def _headers_of(self, names: Sequence[str]) -> list[tuple[int, Bytes] | None]:
        """Size and header bytes of objects; None for what isn't there or can't be a chunk file."""
        return [
            self._whole_header(name, head)
            for name, head in zip(names, self.remote.heads(names, _FIRST_READ), strict=True)
        ]

    def _whole_header(self, name: str, head: Head | None) -> tuple[int, Bytes] | None:
        if head is None:
            return None
        try:
            length = header_length(head.data, head.size, name)
        except DamagedEntry:
            return head.size, b""
        data = head.data
        if len(data) < length <= _MAX_HEADER:
            data = bytes(data) + bytes(self.remote.get(name, len(data), length - len(data)))
        return head.size, data[:length]

    def _read(self, names: Sequence[str], found: Sequence[tuple[int, Bytes] | None]) -> None:
        for name, read in zip(names, found, strict=True):
            pair = group_and_key(name)
            if pair is None or read is None:  # gone since it was listed, or a stale list
                if pair is not None:
                    self.forget(*pair)
                continue
            group, key = pair
            try:
                header = parse_header(read[1], read[0], name)
            except DamagedEntry:
                self.damaged(key)
                continue
            if (header.group, header.key) != (group, key):
                self.damaged(key)
                continue
            with self._lock:
                self._headers[key] = RemoteEntry(name, header)
                self._headers.move_to_end(key)
                while len(self._headers) > _KNOWN_HEADERS:
                    self._headers.popitem(last=False)

    def entries(self, group: str) -> list[RemoteEntry]:
        """What the remote has of a chunk, as far as it can be known now."""
        if not self.asked:
            return []
        self.look_ahead([group])
        if not self.asked:
            return []
        found = [self.entry(key) for key in self._listed(group) or ()]
        return [entry for entry in found if entry is not None]

    def entry(self, key: str) -> RemoteEntry | None:
        """An entry whose header was read."""
        with self._lock:
            if self._off or key in self._damaged:
                return None
            return self._headers.get(key)

    def lists(self, group: str, key: str) -> bool:
        """Whether the remote has an entry, by the group's list, which must be known already."""
        with self._lock:
            return key in self._groups.get(group, (0.0, ()))[1] and key not in self._damaged

    def may_have(self, group: str) -> bool:
        """Whether the remote has a chunk, or could not be asked."""
        return not self.asked or bool(self._listed(group))

    def forget(self, group: str, key: str) -> None:
        """An entry turned out to be gone."""
        with self._lock:
            self._headers.pop(key, None)
            if group in self._groups:
                since, keys = self._groups[group]
                self._groups[group] = (since, tuple(k for k in keys if k != key))

    def added(self, group: str, key: str) -> None:
        """An entry was put there by us."""
        with self._lock:
            self._damaged.discard(key)
            if group in self._groups:
                since, keys = self._groups[group]
                if key not in keys:
                    self._groups[group] = (since, (*keys, key))

    def damaged(self, key: str) -> None:
        """An entry isn't what its name says: this process never takes it again, and puts its own
        in its place."""
        with self._lock:
            self._damaged.add(key)
            self._headers.pop(key, None)
            self._damaged_now += 1
            many = self._damaged_now > _MOST_DAMAGED
        self.failures += 1
        if many:
            self.stop(f"{self.address} holds damaged entries")
        else:
            self.note(f"entry {key[:12]} at {self.address} is damaged: left out")

    def is_damaged(self, key: str) -> bool:
        with self._lock:
            return key in self._damaged

    def close(self) -> None:
        """Ends what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.remote.close()
        self.slow.close()
        self._pool.shutdown(wait=True)
