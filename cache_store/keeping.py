"""Entries that are to stay, as long as somebody needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from cache_store.errors import IntegrityError
from cache_store.reading import ReadableStore


class KeepingStore(ReadableStore):
    """The part of `cache_store.store.ChunkStore` that keeps entries from eviction; see there."""

    def protect(self, key: str) -> None:
        """From now on, until this store is closed, eviction passes over `key`: this process's and,
        as far as there is room to tell them, others'. The entry counts as ingested."""
        self._space.hold((key,))
        if not self.read_only and key:
            self._promote(key)
            self._space.lease.add((key,))

    def protected(self, keys: Iterable[str]) -> set[str]:
        """Protects entries; those of them that are there and no eviction under way takes."""
        wanted = set(keys)
        for key in wanted:
            self.protect(key)
        if wanted and not self.read_only:
            with self._index.transaction():  # such an eviction is through now
                pass
        return {key for key in wanted if self.has_entry(key)}

    def claim(self, key: str) -> bool:
        """Says that this process is about to compute an entry; False where another is at it, or
        was until now. A claim ends with the process or this store, or when it is stored."""
        with self._space.lease.ready(1) as room, self._index.transaction():
            if key in self._space.leases.computing():
                return False
            if room:  # else others aren't told, and may compute it, too
                self._space.lease.add((key,), computing=True, grow=False)
        return True

    @contextlib.contextmanager
    def pinned(self, keys: Iterable[str]) -> Iterator[None]:
        """Within, the entries are not evicted by this process."""
        held = tuple(keys)
        self._space.hold(held)
        try:
            yield
        finally:
            self._space.let_go(held)

    def _promote(self, key: str) -> None:
        with contextlib.suppress(IntegrityError):
            row = self._index.entry(key)
            if row is not None and row.saved and not self.read_only:
                self._index.promote(row)
