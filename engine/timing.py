"""Where the time of one run went."""

import threading
import time
from dataclasses import dataclass
from types import TracebackType

import torch


class Timer:
    """Adds up the seconds spent inside its `with` blocks, which one thread at a time may enter,
    and those that any thread adds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds

    def __enter__(self) -> "Timer":
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.add(time.perf_counter() - self._began)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer: loading its KV, in whichever thread; waiting for it; and the rest, to
    the next layer's loading or, at the last, to the logits. Where the question reads stored KV
    first, that is the reading, and everything computed after it counts with the last layer read."""

    load_s: float
    stall_s: float
    compute_s: float


class Stopwatch:
    """The parts of one prefill, in seconds of host time. An accelerator works behind the host's
    back, so there the parts say when the host waited; only their sum is the work.

    layers: one entry a layer, none where nothing was to be loaded.
    """

    def __init__(self) -> None:
        self.load = Timer()  # finding, opening, reading and checking stored KV, in any thread
        self.stall = Timer()  # what of it nothing was computed during
        self.rotate = Timer()  # placing it: RoPE and the copy into the KV cache
        self.score = Timer()  # scoring and selecting
        self.recompute = Timer()  # computing tokens
        self.layers: list[LayerTime] = []


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a time taken on the host is the time of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
