"""The memory tier: entries' layers, checked once and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cache_store.entry import EntryHeader
from cache_store.tiers.protocol import Bytes, ClosingReader

Layers = Sequence[tuple[Bytes, Bytes]]
_GHOSTS = 4096


@dataclass
class _Held:
    header: EntryHeader
    layers: tuple[tuple[memoryview, memoryview], ...]
    nbytes: int
    readers: int = field(default=0)


class MemoryReader(ClosingReader):
    """An entry in memory, as `EntryReader`. While it is open the entry stays there."""

    tier = "memory"

    def __init__(self, held: _Held, on_close: Callable[[], None]) -> None:
        self.header = held.header
        self._layers: tuple[tuple[memoryview, memoryview], ...] | None = held.layers
        self._on_close = on_close

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """K and V of a layer. Raises IndexError, ValueError after `close`."""
        if self._layers is None:
            raise ValueError("the entry is closed")
        if not 0 <= index < len(self._layers):
            raise IndexError(f"layer {index} of {len(self._layers)}")
        return self._layers[index]

    def close(self) -> None:
        if self._layers is not None:
            self._layers = None
            self._on_close()


class MemoryTier:
    """At most `limit` bytes of K and V, the least recently used leaving first. Threads may share
    it.

    What is being read stays, so an entry for which nothing else could make room is not taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._leaving: set[str] = set()  # dropped while being read
        self._used = 0
        self._seen: OrderedDict[str, None] = OrderedDict()  # read once, and not taken for that

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._held and key not in self._leaving

    @property
    def used(self) -> int:
        """Bytes of K and V that are held."""
        with self._lock:
            return self._used

    def keys(self) -> list[str]:
        """What is held, the least recently used first."""
        with self._lock:
            return [key for key in self._held if key not in self._leaving]

    def open(self, key: str) -> MemoryReader | None:
        """A reader of an entry that is here."""
        with self._lock:
            held = self._held.get(key)
            if held is None or key in self._leaving:
                return None
            self._held.move_to_end(key)
            held.readers += 1
            self.hits += 1
            return MemoryReader(held, lambda: self._let_go(key, held))

    def _let_go(self, key: str, held: _Held) -> None:
        with self._lock:
            held.readers -= 1
            if key in self._leaving and not held.readers:
                self._remove(key)

    def worth(self, key: str, *, once: bool) -> bool:
        """Whether an entry that was just read should be taken. once: it is one that a single prompt
        may have needed, so it has to be read twice: a stream of such doesn't wash out the rest."""
        with self._lock:
            if key in self._held:
                return False
            if not once:
                return True
            again = key in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > _GHOSTS:
                self._seen.popitem(last=False)
            return again

    def put(self, key: str, header: EntryHeader, layers: Layers) -> bool:
        """Takes an entry, its layers already checked; whether it is here now. Bytes are
        copied where they are somebody else's."""
        size = sum(len(k) + len(v) for k, v in layers)
        with self._lock:
            if key in self._held:
                return key not in self._leaving
            if not self._make_room(size):
                return False
            self._used += size  # reserved before it is copied
        try:
            owned = tuple((_owned(k), _owned(v)) for k, v in layers)
        except BaseException:
            with self._lock:
                self._used -= size
            raise
        with self._lock:
            if key in self._held:  # another thread was faster
                self._used -= size
            else:
                self._held[key] = _Held(header, owned, size)
        return True

    def _make_room(self, size: int) -> bool:
        free = self.limit - self._used
        victims: list[str] = []
        for key, held in self._held.items():
            if free >= size:
                break
            if not held.readers:
                victims.append(key)
                free += held.nbytes
        if free < size:
            return False
        for key in victims:
            self._remove(key)
        return True

    def _remove(self, key: str) -> None:
        self._used -= self._held.pop(key).nbytes
        self._leaving.discard(key)

    def drop(self, keys: Iterable[str]) -> None:
        """Lets entries go; those that are being read once they no longer are."""
        with self._lock:
            for key in keys:
                held = self._held.get(key)
                if held is not None and held.readers:
                    self._leaving.add(key)
                elif held is not None:
                    self._remove(key)

    def clear(self) -> None:
        """Lets everything go."""
        self.drop(self.keys())


def _owned(data: Bytes) -> memoryview:
    return memoryview(data if isinstance(data, bytes) else bytes(data))
