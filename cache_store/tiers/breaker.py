"""Whether a remote that failed should be asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES = 3
REST_SECONDS = 30.0


class Breaker:
    """After `failures` failures in a row it says no for `rest` seconds, then lets one trial
    through, on which it depends what follows. Threads may share one."""

    def __init__(
        self,
        failures: int = FAILURES,
        rest: float = REST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._rest, self._clock = failures, rest, clock
        self._lock = threading.Lock()
        self._failed = 0
        self._until = 0.0

    def allows(self) -> bool:
        """Whether to ask now. Where it was resting, yes means that this is the trial."""
        with self._lock:
            if self._failed < self._most:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._until = now + self._rest  # others wait for what becomes of the trial
            return True

    def worked(self) -> None:
        """An answer came."""
        with self._lock:
            self._failed = 0

    def failed(self) -> None:
        """None came, or one that is no use."""
        with self._lock:
            self._failed += 1
            if self._failed >= self._most:
                self._until = self._clock() + self._rest

    @property
    def rests_for(self) -> float:
        """Seconds until the remote is asked again; 0 while it is."""
        with self._lock:
            if self._failed < self._most:
                return 0.0
            return max(0.0, self._until - self._clock())
