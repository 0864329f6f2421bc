"""Where the time of one run went."""

import time
from types import TracebackType

import torch


class Timer:
    """Adds up the seconds spent inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> "Timer":
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._began


class Stopwatch:
    """The parts of one prefill, in seconds of host time. An accelerator works behind the host's
    back, so there the parts say when the host waited; only their sum is the work."""

    def __init__(self) -> None:
        self.load = Timer()  # reading and checking stored KV
        self.rotate = Timer()  # placing it: RoPE and the copy into the KV cache
        self.score = Timer()  # scoring and selecting
        self.recompute = Timer()  # computing tokens


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a time taken on the host is the time of the work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
