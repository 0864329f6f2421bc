"""Where the time of one run went."""

import threading
import time
from dataclasses import dataclass
from types import TracebackType

import torch


class Turn:
    """Which layer's turn it is; None before the first and between two passes over them."""

    layer: int | None = None


class Timer:
    """Adds up the seconds spent inside its `with` blocks, which one thread at a time may enter,
    and those that any thread adds. laps: those of the blocks, by the layer whose turn it was."""

    def __init__(self, turn: Turn | None = None) -> None:
        self.seconds = 0.0
        self.laps: dict[int, float] = {}
        self._turn = turn or Turn()
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
        seconds, layer = time.perf_counter() - self._began, self._turn.layer
        self.add(seconds)
        if layer is not None:
            self.laps[layer] = self.laps.get(layer, 0.0) + seconds


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

    layers: one entry a layer, none where nothing was to be loaded. The rest is by layer, in
    seconds of `time.perf_counter`: loads and stalls: (when it began, how long) and how long;
    reads, starts: when the question's reading came to it, and when its tokens' turn came.
    began, logits: when the prefill began, and when all layers were through.
    """

    def __init__(self) -> None:
        self._turn = Turn()
        self.load = Timer()  # finding, opening, reading and checking stored KV, in any thread
        self.stall = Timer()  # what of it nothing was computed during
        self.rotate = Timer(self._turn)  # placing it: RoPE and the copy into the KV cache
        self.score = Timer(self._turn)  # scoring and selecting
        self.recompute = Timer(self._turn)  # computing tokens
        self.layers: list[LayerTime] = []
        self.loads: dict[int, tuple[float, float]] = {}
        self.stalls: dict[int, float] = {}
        self.reads: dict[int, float] = {}
        self.starts: dict[int, float] = {}
        self.began = time.perf_counter()
        self.logits = 0.0

    def reading(self, layer: int) -> None:
        """The question's reading comes to a layer."""
        self._turn.layer = layer
        self.reads[layer] = time.perf_counter()

    def computing(self, layer: int) -> None:
        """A layer's tokens are to be computed."""
        self._turn.layer = layer
        self.starts[layer] = time.perf_counter()

    def between(self) -> None:
        """No layer's turn."""
        self._turn.layer = None

    def through(self) -> None:
        """All layers are computed."""
        self._turn.layer = None
        self.logits = time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a time taken on the host is the time of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
