"""From mapped files to where a layer's KV is computed with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class InPlace:
    """CPU: mapped files are used where they are. MPS: the computing thread copies them there.

    Of the methods `bring` alone is called in a loader's thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bring(self, layer: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Begins to bring a layer's tensors, views of mapped files, to the device."""
        return tensors

    def take(self, layer: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What `bring` returned, ready to be computed with until `release`."""
        if self._device.type == "cpu":
            return tensors
        return [tensor.to(self._device) for tensor in tensors]

    def release(self, layer: int) -> None:
        """A layer that was taken has been used, as far as the host can tell."""

    def close(self) -> None:
        """Its memory may be used for something else now. No `bring` may follow."""


class _Buffer(NamedTuple):
    """Memory, and the events after which it may be read and written."""

    memory: torch.Tensor
    filled: Any
    free: Any


class Pinned(InPlace):
    """CUDA: through two pinned buffers, in turn, on a stream of its own to `room` buffers there.

    Layer i goes to buffer i modulo `room`, so `bring` may be called for it once layer i - room was
    released. The host waits for the device in the loader's thread alone, until a pinned buffer's
    last copy is done; the streams wait for each other by events. size: elements of a whole layer.
    cuda: `torch.cuda`, or what stands for it in tests.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        size: int,
        room: int,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__(device)
        self._cuda, self._stream = cuda, cuda.Stream(device)
        self._lock, self._turn = threading.Lock(), 0

        def buffer(place: torch.device, pin: bool) -> _Buffer:
            memory = torch.empty(size, dtype=dtype, device=place, pin_memory=pin)
            return _Buffer(memory, cuda.Event(), cuda.Event())

        pin = device.type == "cuda"
        self._host = [buffer(torch.device("cpu"), pin) for _ in range(2)]
        self._there = [buffer(device, False) for _ in range(room)]
        # The memory may have been given back with work on it still to be done.
        self._stream.wait_stream(cuda.current_stream(device))

    def bring(self, layer: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        there = self._there[layer % len(self._there)]
        with self._lock:
            host = self._host[self._turn]
            self._turn = 1 - self._turn
            host.free.synchronize()
            size = sum(tensor.numel() for tensor in tensors)
            for part, tensor in zip(_split(host.memory, tensors), tensors, strict=True):
                part.copy_(tensor)
            with self._cuda.stream(self._stream):
                there.free.wait(self._stream)
                there.memory[:size].copy_(host.memory[:size], non_blocking=True)
                host.free.record(self._stream)
                there.filled.record(self._stream)
        return _split(there.memory, tensors)

    def take(self, layer: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        filled = self._there[layer % len(self._there)].filled
        filled.wait(self._cuda.current_stream(self._device))
        return tensors

    def release(self, layer: int) -> None:
        free = self._there[layer % len(self._there)].free
        free.record(self._cuda.current_stream(self._device))

    def close(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._stream)


def make_staging(device: torch.device, dtype: torch.dtype, size: int, room: int) -> InPlace:
    """The way to this device for layers of `size` elements, `room` of them at once."""
    return Pinned(device, dtype, size, room) if device.type == "cuda" else InPlace(device)


def _split(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory's beginning cut into tensors of these shapes."""
    sizes = [tensor.numel() for tensor in like]
    parts = torch.split(memory[: sum(sizes)], sizes) if sizes else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
