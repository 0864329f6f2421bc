"""What the workers of `test_workers` do, in a module that a new process can import."""

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.errors import NotFoundError

Task = tuple[str, str]


@contextmanager
def starting(closed: Path, device: str) -> Iterator[Callable[[Task], str]]:
    """A worker on `device`; a file in `closed` says that it ended in good order."""
    if device == "absent":
        raise NotFoundError("there is no device absent", "use another")
    if device == "deadly":
        os._exit(3)
    if device.startswith("once:"):
        marker = Path(device.removeprefix("once:"))
        if marker.exists():
            raise NotFoundError("the device went away", "plug it in")
        marker.touch()

    def work(task: Task) -> str:
        what, value = task
        if what == "die" or (what == "die on" and value == device):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "die once" and not Path(value).exists():
            Path(value).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise KeyError(value)
        if what == "wait":
            time.sleep(float(value))
        if what == "sigint":
            os.kill(os.getpid(), signal.SIGINT)
        if what == "sigterm at exit":
            atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        if what == "long":
            return value * 10**6
        return f"{value} on {device} by {os.getpid()}"

    yield work
    closed.joinpath(str(os.getpid())).touch()
