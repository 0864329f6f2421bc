"""How long a prompt may wait for a remote."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Patience:
    """Seconds that may be spent waiting, by however many threads: what several wait at the same
    time counts once."""

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()
        self._left = seconds
        self._waiting = 0
        self._since = 0.0

    def renew(self, seconds: float) -> None:
        """From now on there are so many."""
        with self._lock:
            self._left, self._since = seconds, time.monotonic()

    def end(self) -> None:
        """Nothing is waited for any more."""
        self.renew(0.0)

    @property
    def left(self) -> float:
        """Seconds left, 0 or more."""
        with self._lock:
            waited = time.monotonic() - self._since if self._waiting else 0.0
            return max(0.0, self._left - waited)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, time counts."""
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                now = time.monotonic()
                self._left -= now - self._since
                self._since = now
