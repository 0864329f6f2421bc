"""A remote in this process, on which everything can go wrong, and machines that share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cache_store.tiers.breaker import Breaker
from cache_store.tiers.protocol import Bytes, Head, RemoteError
from cache_store.tiers.remote import RemoteTier
from cache_store.tiers.tiered import TieredStore, open_tiered


class Shelf:
    """A `Remote` over a dictionary. `before` is called with the name of each operation, and may
    raise or wait; `requests` lists what was asked for: operation, name, first byte, bytes."""

    address = "shelf://here"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int, int]] = []
        self.before: Callable[[str], None] = lambda operation: None
        self._lock = threading.Lock()

    def _asked(self, operation: str, name: str, start: int = 0, length: int = 0) -> None:
        with self._lock:
            self.requests.append((operation, name, start, length))
        self.before(operation)

    def count(self, *operations: str) -> int:
        return sum(request[0] in operations for request in self.requests)

    def names(self, prefixes: Sequence[str]) -> list[list[str]]:
        self._asked("names", ",".join(prefixes))
        return [[n for n in sorted(self.objects) if n.startswith(p)] for p in prefixes]

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        self._asked("heads", ",".join(names))
        found = [self.objects.get(name) for name in names]
        return [Head(len(data), data[:length]) if data else None for data in found]

    def get(self, name: str, start: int, length: int) -> Bytes:
        self._asked("get", name, start, length)
        return self.objects.get(name, b"")[start : start + length]

    def put(self, name: str, data: memoryview) -> None:
        self._asked("put", name, 0, data.nbytes)
        self.objects[name] = bytes(data)

    def delete(self, name: str) -> None:
        self._asked("delete", name)
        self.objects.pop(name, None)

    def close(self) -> None:
        pass


def fails(*operations: str) -> Callable[[str], None]:
    """For `Shelf.before`: these operations (all, if none is named) find the connection lost."""

    def raise_error(operation: str) -> None:
        if not operations or operation in operations:
            raise RemoteError("shelf://here: connection lost")

    return raise_error


class Hangs:
    """For `Shelf.before`: these operations (all, if none is named) wait until it is `over`, which
    it is at the end of a `with` block."""

    def __init__(self, *operations: str) -> None:
        self._operations = operations
        self.over = threading.Event()

    def __call__(self, operation: str) -> None:
        if not self._operations or operation in self._operations:
            self.over.wait(60)

    def __enter__(self) -> Hangs:
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()


def machine(
    folder: Path,
    shelf: Shelf,
    *,
    timeout: float = 2.0,
    memory: int = 0,
    breaker: Breaker | None = None,
    limit: int = 2**28,
    read_only: bool = False,
) -> TieredStore:
    """A store of its own that shares the remote."""
    return open_tiered(
        folder,
        remote=lambda: RemoteTier(lambda seconds: shelf, timeout, breaker=breaker),
        memory_limit=memory,
        limit_bytes=limit,
        read_only=read_only,
    )
