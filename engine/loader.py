"""Brings stored chunk KV to the device, one layer at a time."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from cache_store.errors import IntegrityError, NotFoundError
from engine.model import Decoder
from engine.policies import LayerKV
from engine.sources import KVStore, LayerReader, Source
from engine.timing import Stopwatch


class DamagedSource(IntegrityError):
    """An entry that turned out unusable when read; `key` names it."""

    def __init__(self, key: str, error: IntegrityError | NotFoundError) -> None:
        super().__init__(error.message, error.hint)
        self.key = key


# Stored KV is mapped for reading only, and only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

T = TypeVar("T")


def _guard(key: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (IntegrityError, NotFoundError) as error:  # not found: evicted since it was looked up
        raise DamagedSource(key, error) from error


@dataclass(frozen=True)
class LoadedSegment:
    """One segment's KV at one layer: `kv` [T, kv_heads, head_dim] at positions [start, end)."""

    start: int
    end: int
    exact: bool
    kv: LayerKV


class LayerLoader:
    """Reads the entries behind `sources` layer by layer, each checked before it is used.

    A context manager. Raises DamagedSource from the constructor and from `layer`.
    """

    def __init__(
        self, model: Decoder, store: KVStore | None, sources: Sequence[Source], watch: Stopwatch
    ) -> None:
        self._model, self._watch = model, watch
        self._open: list[tuple[Source, str, LayerReader]] = []
        self.bytes_loaded = 0
        try:
            for source in sources:
                if source.match is not None and store is not None:
                    key = source.match.key
                    self._open.append((source, key, _guard(key, partial(store.open_entry, key))))
        except DamagedSource:
            self.close()
            raise

    def layer(self, index: int, *, exact_only: bool = False) -> list[LoadedSegment]:
        """The layer's K (before RoPE) and V of every open entry, on the model's device."""
        loaded = []
        with self._watch.load:
            for source, key, reader in self._open:
                exact = source.status == "exact"
                if exact_only and not exact:
                    continue
                k, v = _guard(key, partial(reader.layer, index))
                self.bytes_loaded += k.nbytes + v.nbytes
                segment = source.segment
                loaded.append(
                    LoadedSegment(
                        segment.start,
                        segment.end,
                        exact,
                        LayerKV(self._tensor(k), self._tensor(v)),
                    )
                )
        return loaded

    def _tensor(self, buffer: memoryview) -> torch.Tensor:
        c = self._model.config
        flat = torch.frombuffer(buffer, dtype=self._model.dtype)
        return flat.view(-1, c.kv_heads, c.head_dim).to(self._model.device)

    def close(self) -> None:
        for _, _, reader in self._open:
            reader.close()
        self._open = []

    def __enter__(self) -> "LayerLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
