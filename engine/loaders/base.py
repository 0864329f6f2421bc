"""What all loaders have in common: open entries, the plan, checks, times, and the way to close."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import torch

from cache_store.errors import IntegrityError, NotFoundError
from cache_store.tiers.protocol import LostEntry
from engine.loaders.staging import make_staging
from engine.policies import LayerKV
from engine.timing import LayerTime, Stopwatch

if TYPE_CHECKING:
    from engine.codec import Codec
    from engine.model import Decoder
    from engine.sources import KVStore, LayerReader, Source


class DamagedSource(IntegrityError):
    """An entry that turned out unusable when read; `key` names it. lost: it isn't damaged here, a
    remote didn't give it; gone: it isn't there."""

    def __init__(self, key: str, error: IntegrityError | NotFoundError | LostEntry) -> None:
        super().__init__(error.message, error.hint)
        self.key = key
        self.lost = isinstance(error, LostEntry)
        self.gone = isinstance(error, NotFoundError)


# Stored KV is mapped for reading only, and only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass(frozen=True)
class LoadedSegment:
    """One segment's KV at one layer: `kv` [T, kv_heads, head_dim] at positions [start, end)."""

    start: int
    end: int
    exact: bool
    kv: LayerKV


@dataclass(frozen=True)
class _Entry:
    key: str
    start: int
    end: int
    exact: bool
    reader: LayerReader


class LayerLoader(ABC):
    """Brings the entries behind `sources` to the device, each layer checked before it is used.

    A context manager for one prompt: `start`, then `layer` for every layer in turn; closing it
    ends what it runs in the background and then gives the entries back. `space`: how many layers
    may be loaded at once, None for all; on CUDA that is device memory, elsewhere mapped files are
    used in place, unless they are stored in another type. Raises DamagedSource from the
    constructor, `start` and `layer`.

    Where ranks share the model, each takes its own heads out of the entries, and none may stop
    while the others wait for it: what goes wrong after the constructor is kept in `troubles`, and
    zeros stand for what is missing.
    """

    name: ClassVar[str]
    space: ClassVar[int | None] = None

    def __init__(
        self,
        model: Decoder,
        store: KVStore | None,
        sources: Sequence[Source],
        watch: Stopwatch,
        codec: Codec,
    ) -> None:
        c = model.config
        self._share = model.ranks.share
        self.troubles: list[Exception] = []
        self._watch, self._layers, self._codec = watch, c.layers, codec
        self._room = min(self.space or c.layers, c.layers)
        self._exact_before = 0
        self._entries: list[_Entry] = []
        self._closing = False
        self._current: int | None = None  # the layer being computed
        self._held = False  # whether its KV is still in use
        self._since = 0.0  # when its computation began
        self._load_s, self._stall_s = [0.0] * c.layers, [0.0] * c.layers
        self._bytes: list[Counter[str]] = [Counter() for _ in range(c.layers)]
        tokens = sum(len(s.segment.token_ids) for s in sources if s.match is not None)
        self._values = size = 2 * tokens * c.kv_heads * c.head_dim
        self._decoded: dict[int, torch.Tensor] = {}
        with watch.load, watch.stall:
            self._staging = make_staging(model.device, model.dtype, size, self._room)
            try:
                for source in sources:
                    if source.match is not None and store is not None:
                        key, segment = source.match.key, source.segment
                        try:
                            reader = store.open_entry(key)
                        except (IntegrityError, NotFoundError, LostEntry) as error:
                            # Not found: evicted since it was looked up.
                            raise DamagedSource(key, error) from error
                        exact = source.status == "exact"
                        entry = _Entry(key, segment.start, segment.end, exact, reader)
                        self._entries.append(entry)
            except BaseException:
                self.close()
                raise

    @property
    def bytes_loaded(self) -> int:
        return sum(self.tiers.values())

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes of stored KV that were read, by the tier they came from."""
        return dict(sum(self._bytes, Counter()))

    def start(self, exact_before: int = 0) -> None:
        """Begins to load. Layers below `exact_before` compute every token that is not exact, so
        there exact segments alone are loaded."""
        self._exact_before = exact_before
        self._begin()

    def layer(self, index: int) -> list[LoadedSegment]:
        """The layer's K (before RoPE) and V, what is needed of them, on the model's device.

        They are good until `release`, or the next call.
        """
        self._end_layer()
        began = time.perf_counter()
        tensors = self._staging.take(index, self._take(index))
        self._current, self._held = index, True
        self._since = time.perf_counter()
        self._stall_s[index] += self._since - began
        self._watch.stalls[index] = self._stall_s[index]
        self._watch.stall.add(self._since - began)
        pairs = zip(self._needed(index), tensors[::2], tensors[1::2], strict=True)
        return [LoadedSegment(e.start, e.end, e.exact, LayerKV(k, v)) for e, k, v in pairs]

    def release(self) -> None:
        """Says that what `layer` gave has been used: its space may be filled again."""
        if self._held and self._current is not None:
            self._held = False
            self._staging.release(self._current)
            self._released(self._current)

    def close(self) -> None:
        """Waits for reads under way, starts no more, and gives the entries back."""
        self._closing = True
        self._stop()
        self._staging.close()
        for entry in self._entries:
            entry.reader.close()
        self._entries = []

    # What a loader decides: when `_load` is called, and in which thread.

    @abstractmethod
    def _begin(self) -> None:
        """The plan is known."""

    @abstractmethod
    def _take(self, index: int) -> list[torch.Tensor]:
        """What `_load` returned for a layer, waiting for it or calling it."""

    def _released(self, index: int) -> None:  # noqa: B027
        """There is space for one layer more."""

    def _stop(self) -> None:  # noqa: B027
        """No `_load` may run after this. May be called before `_begin`, and twice."""

    def _load(self, index: int) -> list[torch.Tensor]:
        """Reads and checks a layer in the calling thread: K and V of each entry needed, in turn."""
        began = time.perf_counter()
        tensors: list[torch.Tensor] = []
        sizes: Counter[str] = Counter()
        for entry in self._needed(index):
            if self._closing:
                break
            try:
                parts = entry.reader.layer(index)
                values = self._values_of(index, parts, entry.end - entry.start, tensors)
            except (IntegrityError, NotFoundError, LostEntry) as error:
                if self._share is None:
                    raise DamagedSource(entry.key, error) from error
                values = self._missing(entry, DamagedSource(entry.key, error))
            except Exception as error:
                if self._share is None:
                    raise
                values = self._missing(entry, error.with_traceback(None))  # which holds the entry
            else:
                sizes[entry.reader.tier] += sum(part.nbytes for part in parts)
            tensors += values
        self._bytes[index] = sizes
        tensors = self._staging.bring(index, tensors)
        self._load_s[index] = time.perf_counter() - began
        self._watch.load.add(self._load_s[index])
        self._watch.loads[index] = began, self._load_s[index]
        return tensors

    def _values_of(
        self,
        index: int,
        parts: tuple[memoryview, memoryview],
        tokens: int,
        before: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """K and V of an entry: where they are, or else decoded behind those `before` them into
        memory that the layers with space to be loaded take in turn."""
        if self._codec.plain and self._share is None:
            return [self._codec.view(part, tokens) for part in parts]
        memory = self._decoded.get(index % self._room)
        if memory is None:
            memory = torch.empty(self._values, dtype=self._codec.computed)
            self._decoded[index % self._room] = memory
        at = sum(tensor.numel() for tensor in before)
        found = []
        for part, is_v in zip(parts, (False, True), strict=True):
            if self._share is None:
                values = self._codec.decode(part, is_v, tokens, memory[at:])
            else:
                own = self._share.slice()
                values = self._codec.decode_heads(part, is_v, tokens, own, memory[at:])
            found.append(values)
            at += values.numel()
        return found

    def _missing(self, entry: _Entry, trouble: Exception) -> list[torch.Tensor]:
        """What stands for KV that can't be had, where other ranks count on this one."""
        assert self._share is not None
        self.troubles.append(trouble)
        shape = (entry.end - entry.start, self._share.count, self._codec.head_dim)
        return [torch.zeros(shape, dtype=self._codec.computed)] * 2

    def _needed(self, index: int) -> Iterator[_Entry]:
        return (e for e in self._entries if e.exact or index >= self._exact_before)

    def _end_layer(self) -> None:
        self.release()
        if self._current is not None:
            index, self._current = self._current, None
            computed = time.perf_counter() - self._since
            self._watch.layers.append(
                LayerTime(self._load_s[index], self._stall_s[index], computed)
            )

    def __enter__(self) -> LayerLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end_layer()
        self.close()
