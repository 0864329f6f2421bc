"""Readers: of a remote's entry, read a few layers at a time, ahead of the one that is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cache_store.errors import IntegrityError
from cache_store.tiers.layers import Layers, is_layer, layer_bytes, parts
from cache_store.tiers.protocol import Bytes, ClosingReader, LostEntry, Reader, Remote, RemoteError
from cache_store.tiers.remote import RemoteEntry

if TYPE_CHECKING:
    from cache_store.tiers.remote import RemoteTier

SPAN_BYTES = 2**20
"""Layers are asked for together up to this size: a request costs as much as some hundred kB."""

_AHEAD = 3  # spans that are asked for beyond the one in use


class RemoteReader(ClosingReader):
    """As `EntryReader`, over a remote. `layer` raises LostEntry where the remote fails or answers
    with anything but the layer's bytes.

    on_close: told once the reader is closed, with the reader, which can then be `complete`d.
    """

    tier = "remote"

    def __init__(
        self, tier: RemoteTier, entry: RemoteEntry, on_close: Callable[[RemoteReader], None]
    ) -> None:
        self.header, self._entry, self._tier = entry.header, entry, tier
        self._on_close: Callable[[RemoteReader], None] | None = on_close
        layers = self.header.spec.layers
        self._layer_bytes = layer_bytes(self.header)
        together = max(1, SPAN_BYTES // self._layer_bytes)
        # The first layer comes alone: with it computing begins.
        starts = [0, *range(1, layers, together)]
        self._spans = list(zip(starts, [*starts[1:], layers], strict=True))
        self._span_of = [n for n, (a, b) in enumerate(self._spans) for _ in range(a, b)]
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Bytes]] = {}
        self._data: dict[int, memoryview] = {}  # layers that came and were checked
        self.failed = False
        self._ask(0)

    def _ask(self, last: int) -> None:
        """Has every span up to `last` asked for."""
        with self._lock:
            for span in range(min(last + 1, len(self._spans))):
                if span not in self._asked:
                    self._asked[span] = self._tier.submit(
                        lambda span=span: self._fetch(span, self._tier.remote)  # type: ignore[misc]
                    )

    def _fetch(self, span: int, remote: Remote) -> Bytes:
        first, end = self._spans[span]
        start = self.header.header_bytes + first * self._layer_bytes
        return remote.get(self._entry.name, start, (end - first) * self._layer_bytes)

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """K and V of a layer, checked. Raises LostEntry, IndexError, ValueError after `close`."""
        if not 0 <= index < len(self._span_of):
            raise IndexError(f"layer {index} of {len(self._span_of)}")
        if self._on_close is None:
            raise ValueError("the entry is closed")
        if index not in self._data:
            span = self._span_of[index]
            self._ask(span + _AHEAD)
            try:
                if not self._tier.asked:
                    raise RemoteError(f"{self._tier.address} is done without")
                data = self._tier.wait(self._asked[span])
            except RemoteError as error:
                self.failed = True
                raise LostEntry(f"entry {self.header.key[:12]}: {error.message}") from error
            self._keep(span, data)
        return parts(self.header, self._data[index])

    def _keep(self, span: int, data: Bytes) -> None:
        """Checks the layers of a span. Raises LostEntry for bytes that aren't theirs."""
        first, end = self._spans[span]
        view = memoryview(data).cast("B")
        whole = view.nbytes == (end - first) * self._layer_bytes
        for index in range(first, end) if whole else ():
            start = (index - first) * self._layer_bytes
            layer = view[start : start + self._layer_bytes]
            if not is_layer(self.header, index, layer):
                whole = False
                break
            self._data[index] = layer
        if not whole:
            self.failed = True
            self._tier.damaged(self.header.key)
            raise LostEntry(
                f"entry {self.header.key[:12]} at {self._tier.address} is cut short or damaged"
            )
        self._tier.bytes_read += view.nbytes

    def complete(self, given_up: Callable[[], bool] = lambda: False) -> Layers:
        """All layers, those that weren't needed read now, without a prompt waiting for them.

        given_up: asked before each request, whether it is still wanted. Raises LostEntry,
        RemoteError.
        """
        for index, span in enumerate(self._span_of):
            if index not in self._data:
                if given_up():
                    raise LostEntry(f"entry {self.header.key[:12]} is no longer wanted")
                asked = self._asked.get(span)
                come = asked is not None and asked.done() and not asked.cancelled()
                data = asked.result() if asked is not None and come else None
                self._keep(span, data or self._fetch(span, self._tier.slow))
        return [parts(self.header, self._data[index]) for index in range(len(self._span_of))]

    def close(self) -> None:
        """Asks for nothing more. Closing twice is fine; views handed out stay good."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        with self._lock:
            for future in self._asked.values():
                future.cancel()
        on_close(self)


class WatchedReader(ClosingReader):
    """A reader that is handed on when it is closed."""

    def __init__(self, reader: Reader, on_close: Callable[[Reader, bool], None]) -> None:
        """on_close: told the reader, and whether it was sound as far as it was read."""
        self.header, self.tier = reader.header, reader.tier
        self._reader, self._on_close = reader, on_close
        self._closed, self._sound = False, True

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        if self._closed:
            raise ValueError("the entry is closed")
        try:
            return self._reader.layer(index)
        except IntegrityError:
            self._sound = False
            raise

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self._reader, self._sound)
