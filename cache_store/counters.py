"""What happened to a store, counted: misses and why, evictions; for all processes together."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

from cache_store.catalog import Catalog
from cache_store.errors import CacheblendError

_PATIENCE = 0.5  # seconds: they are written at the end, when somebody waits for their prompt


class Counters:
    """Named counts, in the catalog. Those of this process are kept in memory until `flush`, so
    that a prompt doesn't wait for them; in a store open for reading they are never written."""

    def __init__(self, catalog: Catalog, *, read_only: bool) -> None:
        self._catalog, self._read_only = catalog, read_only
        self._lock = threading.Lock()
        self._new: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Counts something: `name` is of words with dots between, as "miss.damaged"."""
        with self._lock:
            self._new[name] += number

    def flush(self) -> None:
        """Writes what was counted since. What can't be written is kept for the next time."""
        with self._lock:
            if self._read_only or not self._new:
                return
            new, self._new = self._new, Counter()
            written = False
            with (
                contextlib.suppress(CacheblendError),
                self._catalog.writing(count=False, patience=_PATIENCE) as db,
            ):
                db.executemany(
                    "INSERT INTO counter VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                    new.items(),
                )
                written = True
            if not written:
                self._new.update(new)

    def read(self) -> dict[str, int]:
        """All counts, this process's unwritten ones included."""
        written: Counter[str] = Counter(dict(self._catalog.ask("SELECT name, value FROM counter")))
        with self._lock:
            return dict(sorted((written + self._new).items()))
