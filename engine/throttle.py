"""A store as slow as one likes: a disk of a set bandwidth, for tests and benches."""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cache_store.counters import Counters
from cache_store.keys import KVSpec
from cache_store.misses import MissReason
from cache_store.store import Match
from engine.sources import KVStore, LayerReader


class ThrottledStore:
    """Another store, whose layers come at `bytes_per_s` in all, whichever threads read them.

    A `KVStore`. Reading a layer takes at least its bytes / bytes_per_s, and what several threads
    read at once comes one after the other, in the order it was asked for. Raises ValueError for a
    bandwidth that isn't above 0.
    """

    def __init__(self, store: KVStore, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a bandwidth of {bytes_per_s} bytes/s")
        self._store, self._bytes_per_s = store, bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0  # when all that was asked for will have come

    def due(self, nbytes: int, asked: float) -> float:
        """When bytes asked for at `asked` will have come; both as `time.perf_counter` counts."""
        with self._lock:
            self._free_at = max(self._free_at, asked) + nbytes / self._bytes_per_s
            return self._free_at

    def open_entry(self, key: str) -> LayerReader:
        return _ThrottledReader(self, self._store.open_entry(key))

    # The rest is the store's own.

    @property
    def damaged(self) -> list[str]:
        return self._store.damaged

    @property
    def read_only(self) -> bool:
        return self._store.read_only

    def look_ahead(
        self, spec: KVSpec, chunks: Iterable[Sequence[int]], seconds: float | None = None
    ) -> None:
        self._store.look_ahead(spec, chunks, seconds)

    def take_notes(self) -> list[str]:
        return self._store.take_notes()

    def find(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        return self._store.find(
            spec, token_ids, context, regime=regime, strict_context=strict_context
        )

    def find_here(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        return self._store.find_here(
            spec, token_ids, context, regime=regime, strict_context=strict_context
        )

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
        return self._store.put(
            spec, token_ids, context, regime, layers, chunk_id=chunk_id, saved=saved
        )

    def contains(
        self, spec: KVSpec, token_ids: Sequence[int], context: Sequence[int], regime: str = ""
    ) -> bool:
        return self._store.contains(spec, token_ids, context, regime)

    def bring(self, wanted: Sequence[tuple[str, str]]) -> set[str]:
        return self._store.bring(wanted)

    def discard(self, key: str) -> Any:
        return self._store.discard(key)

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[Any]:
        return self._store.pinned(keys)

    def reason_for_miss(
        self, spec: KVSpec, token_ids: Sequence[int], chunk_id: str, *, strict: bool = False
    ) -> MissReason:
        return self._store.reason_for_miss(spec, token_ids, chunk_id, strict=strict)

    def note_uses(self) -> None:
        self._store.note_uses()

    @property
    def counters(self) -> Counters:
        return self._store.counters


class _ThrottledReader:
    def __init__(self, store: ThrottledStore, reader: LayerReader) -> None:
        self._store, self._reader = store, reader
        self.tier = reader.tier

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        began = time.perf_counter()
        k, v = self._reader.layer(index)
        due = self._store.due(k.nbytes + v.nbytes, began)
        time.sleep(max(0.0, due - time.perf_counter()))
        return k, v

    def close(self) -> None:
        self._reader.close()
