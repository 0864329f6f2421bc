"""Which entries go first where room is needed."""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, get_args

from cache_store.catalog import Catalog
from cache_store.disk import lock_unused
from cache_store.errors import CacheblendError, IntegrityError, UsageError
from cache_store.index import EntryRow, Index, Use
from cache_store.pins import Pins
from cache_store.results import EntryInfo

Policy = Literal["lru", "lfu", "none"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
DEFAULT_POLICY: Policy = "lru"
HALF_LIFE = 7 * 86400.0
"""Seconds after which uses count half (lfu): what was popular long ago doesn't stay for ever."""

_PROPERTY = "eviction"
_AHEAD = 1024  # entries to go that are looked up at once
_LOOK_SHARE = 20  # at most about a twentieth of the time goes into looking them up anew


def check_policy(name: str) -> Policy:
    """The policy of that name. Raises UsageError."""
    for policy in POLICIES:
        if policy == name:
            return policy
    raise UsageError(f"eviction {name!r} is unknown", "use one of " + ", ".join(POLICIES))


def policy_of(catalog: Catalog) -> Policy:
    """The store's policy; the usual one where none was set or it can't be read."""
    try:
        rows = catalog.ask("SELECT value FROM property WHERE name = ?", (_PROPERTY,))
        return check_policy(rows[0][0]) if rows else DEFAULT_POLICY
    except CacheblendError:
        return DEFAULT_POLICY


def set_policy(catalog: Catalog, policy: Policy) -> None:
    """Sets the store's policy, for every process."""
    with catalog.writing(count=False) as db:
        db.execute("INSERT OR REPLACE INTO property VALUES (?, ?)", (_PROPERTY, policy))


@dataclass
class _Queue:
    """Entries in the order in which they go, as they were at one moment. seconds: what it took to
    find out."""

    uses: list[Use] = field(default_factory=list)
    policy: Policy | None = None
    found_at: float = float("-inf")
    seconds: float = 0.0

    def is_fresh(self, policy: Policy) -> bool:
        age = time.monotonic() - self.found_at
        return self.policy == policy and age < _LOOK_SHARE * self.seconds


@dataclass(frozen=True)
class Victim:
    """An entry that is to go, and the lock that keeps readers away until it is gone."""

    row: EntryRow
    lock: int

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)


class Eviction:
    """Names entries to remove: first those that only prompts saved, then by the store's policy.
    Never those in use: held by this process (`held`), listed by another, open anywhere, or of a
    pinned document. The order is looked up for many at once, and every entry once more before it
    goes."""

    def __init__(
        self, index: Index, held: Callable[[], set[str]], listed: Callable[[], set[str]]
    ) -> None:
        self._index, self._held, self._listed = index, held, listed
        self._catalog: Catalog | None = None
        self._pins: Pins | None = None
        self._queues = {True: _Queue(), False: _Queue()}

    def use_catalog(self, catalog: Catalog) -> None:
        """Where the policy and the pins are from now on."""
        self._catalog, self._pins = catalog, Pins(catalog)

    @property
    def policy(self) -> Policy:
        return policy_of(self._catalog) if self._catalog else DEFAULT_POLICY

    def pinned_groups(self) -> set[str]:
        """Groups of the chunks of pinned documents."""
        return self._index.groups_of_chunks(self._pinned_chunks())

    def _pinned_chunks(self) -> set[str]:
        return self._pins.chunks() if self._pins else set()

    def suffices(self, excess: int, *, saved_only: bool) -> bool:
        """Whether entries of so many bytes could go now."""
        if self.policy == "none":
            return False
        kept, pinned = self._held() | self._listed(), self.pinned_groups()
        sizes = {key: size for key, group, size in self._index.sizes() if group not in pinned}
        for saved in (True,) if saved_only else (True, False):
            for use in self._index.uses(saved=saved):
                if use.key not in kept:
                    excess -= sizes.get(use.key, 0)
                    if excess <= 0:
                        return True
        return False

    def victims(self, excess: int, most: int, *, saved_only: bool) -> list[Victim]:
        """Entries of `excess` bytes, or `most` of them, or all there are; locked. Within a
        transaction."""
        policy = self.policy
        if policy == "none":
            return []
        kept = self._held() | self._listed()
        pinned = self._pinned_chunks()
        victims: list[Victim] = []
        for saved in (True,) if saved_only else (True, False):
            for row in self._rows(policy, kept, pinned, saved=saved):
                lock = lock_unused(row.path)
                if lock is not None:
                    victims.append(Victim(row, lock))
                    excess -= row.size
                if excess <= 0 or len(victims) >= most:  # before the next is taken off the queue
                    return victims
        return victims

    def give_way(self, nbytes: int) -> list[str]:
        """Removes the files of entries of so many bytes, and leaves their rows: for a disk so full
        that no transaction has room. A row without its file is a miss. Returns their keys."""
        gone = []
        for victim in self.victims(nbytes, _AHEAD, saved_only=False):
            with contextlib.suppress(OSError):
                victim.row.path.unlink()
                gone.append(victim.row.key)
            victim.release()
        return gone

    def _rows(
        self, policy: Policy, kept: set[str], pinned: set[str], *, saved: bool
    ) -> Iterator[EntryRow]:
        """Entries of one class that may go, each once, as they are now. What is taken from the
        queue and not removed comes back with the next look."""
        anew = False
        while True:
            queue = self._queues[saved]
            if not queue.is_fresh(policy) or (not queue.uses and not anew):
                queue = self._queues[saved] = self._look(policy, kept, pinned, saved=saved)
                anew = True
            if not queue.uses:
                return
            while queue.uses:
                use = queue.uses.pop()
                row = self._as_queued(use, kept, pinned, saved=saved)
                if row is not None:
                    yield row
            if anew:
                return

    def _as_queued(
        self, use: Use, kept: set[str], pinned: set[str], *, saved: bool
    ) -> EntryRow | None:
        """The entry, unless it was used since or is one that must stay."""
        try:
            row = self._index.entry(use.key)
            if row is None or (row.used_at, row.saved) != (use.used_at, saved) or row.key in kept:
                return None
            if pinned:
                group = self._index.group(row.group)
                if group is not None and group.chunk_id in pinned:
                    return None
        except IntegrityError:  # verify's business
            return None
        return row

    def _look(self, policy: Policy, kept: set[str], pinned: set[str], *, saved: bool) -> _Queue:
        began = time.monotonic()
        groups = self._index.groups_of_chunks(pinned)
        in_order = policy == "lru" and not saved
        uses = self._index.uses_by_time() if in_order else self._index.uses(saved=saved)
        loose = (use for use in uses if use.key not in kept and use.group not in groups)
        if in_order:
            first = list(islice(loose, _AHEAD))
        else:
            first = heapq.nsmallest(_AHEAD, loose, key=_lfu if policy == "lfu" else _lru)
        now = time.monotonic()
        return _Queue(first[::-1], policy, now, now - began)


def _lru(use: Use) -> tuple[float, str]:
    return use.used_at, use.key


def _lfu(use: Use) -> tuple[float, str]:
    """By how often it was used, where uses count half after HALF_LIFE; among equals by the last
    use. That every score falls alike as time goes by leaves the order as it is."""
    return math.log2(1 + use.hits) + use.used_at / HALF_LIFE, use.key


def in_order(entries: Iterable[EntryInfo], policy: Policy) -> list[EntryInfo]:
    """Entries in the order in which they would go: those that prompts saved first."""
    by_use = _lfu if policy == "lfu" else _lru

    def order(entry: EntryInfo) -> tuple[bool, float, str]:
        use = Use(entry.key, "", entry.used_at, entry.hits)
        return (not entry.saved, *by_use(use))

    return sorted(entries, key=order)


def freed(victims: Sequence[Victim]) -> int:
    """Bytes on disk that they take."""
    return sum(victim.row.size for victim in victims)
