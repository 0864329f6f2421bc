"""A store in this process's memory, for what must leave no trace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cache_store.errors import NotFoundError
from cache_store.keys import KVSpec, entry_key, group_key
from cache_store.results import Match


@dataclass(frozen=True)
class MemoryEntry:
    """layers: K (before RoPE) and V of each, as `ChunkStore.put` takes them."""

    group: str
    context: tuple[int, ...]
    regime: str
    layers: tuple[tuple[bytes, bytes], ...]


class MemoryStore:
    """What blending needs of `engine.sources.KVStore`: entries are put, found and read.

    entries: by key; they can be handed to another process's.
    """

    read_only = False

    def __init__(self) -> None:
        self.entries: dict[str, MemoryEntry] = {}

    def find(
        self,
        spec: KVSpec,
        token_ids: Sequence[int],
        context: Sequence[int],
        *,
        regime: str = "",
        strict_context: Sequence[int] | None = None,
    ) -> Match | None:
        """KV of these tokens behind this very context, or else behind any other one."""
        group, behind = group_key(spec, token_ids), tuple(context)
        exact = entry_key(group, behind, regime)
        others = [key for key, entry in self.entries.items() if entry.group == group]
        key = exact if exact in self.entries else next(iter(others), None)
        if key is None:
            return None
        entry = self.entries[key]
        size = sum(len(part) for parts in entry.layers for part in parts)
        return Match(key, size, 0, key == exact, entry.context, entry.regime)

    def contains(
        self, spec: KVSpec, token_ids: Sequence[int], context: Sequence[int], regime: str = ""
    ) -> bool:
        return entry_key(group_key(spec, token_ids), tuple(context), regime) in self.entries

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
        group, behind = group_key(spec, token_ids), tuple(context)
        key = entry_key(group, behind, regime)
        copied = tuple((bytes(k), bytes(v)) for k, v in layers)
        self.entries[key] = MemoryEntry(group, behind, regime, copied)
        return key

    def open_entry(self, key: str) -> "MemoryReader":
        if key not in self.entries:
            raise NotFoundError(f"no entry {key}")
        return MemoryReader(self.entries[key])

    def discard(self, key: str) -> None:
        self.entries.pop(key, None)

    def bring(self, wanted: Sequence[tuple[str, str]]) -> set[str]:
        """Nothing is anywhere else."""
        return set()

    @contextmanager
    def pinned(self, keys: Sequence[str]) -> Iterator[None]:
        yield


class MemoryReader:
    """An entry's layers, as copies: tensors over them may be written to."""

    tier = "memory"

    def __init__(self, entry: MemoryEntry) -> None:
        self._layers = entry.layers

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        k, v = self._layers[index]
        return memoryview(bytearray(k)), memoryview(bytearray(v))

    def close(self) -> None:
        return
