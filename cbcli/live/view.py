"""Where something is shown while it goes on: nowhere, as plain lines, or in a region of a terminal
(`cbcli.live.region`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from cbcli.progress import PLAIN_INTERVAL

if TYPE_CHECKING:
    from cbcli.inspect.lines import Line
    from cbcli.inspect.theme import Look


SPARSE = 100
LONGEST = 1.0  # seconds that a picture stays, however long it takes to draw


class Scene(Protocol):
    """What is going on. All of it may be asked from another thread than it goes on in."""

    def lines(self, columns: int, rows: int | None, look: Look) -> Sequence[Line]:
        """It now, in at most `rows` lines; None: all there is, for it has ended."""

    def status(self) -> str:
        """It now, in one line."""

    def told(self, label: str, facts: str) -> None:
        """How far a piece of work within it is; see `cbcli.progress`."""


class View:
    """Shows nothing. A context manager: what goes wrong inside takes away what was shown."""

    def begin(self) -> None:
        """From now on it is shown."""

    def above(self, text: str) -> bool:
        """Write a line, which may hold colours, above what is shown; False: there is no such
        place."""
        return False

    def say(self, text: str) -> None:
        """Something was done; where all is in sight that is not said."""

    def close(self, *, keep: bool = True) -> None:
        """The end: what was shown stays, as it is now, or goes. May be called again."""

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(keep=kind is None)


class Ticker:
    """Calls something in a thread of its own, `interval` seconds after it last did, or later: it
    takes one part in SPARSE of the time of a core, for that is time that others don't have."""

    def __init__(self, action: Callable[[], None], interval: float) -> None:
        self._action, self._interval = action, interval
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        wait = self._interval
        while not self._ending.wait(wait):
            began = time.thread_time()
            self._action()
            took = time.thread_time() - began
            wait = max(self._interval, min(SPARSE * took, LONGEST))

    def stop(self) -> None:
        """Not called again once this returns, unless it hangs: then it isn't waited for."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(2.0)


class PlainView(View):
    """What was done, a line each, and now and then how far it is."""

    def __init__(
        self, scene: Scene, write: Callable[[str], None], interval: float = PLAIN_INTERVAL
    ) -> None:
        self._write = write
        self._ticker = Ticker(lambda: write(scene.status()), interval)

    def begin(self) -> None:
        self._ticker.start()

    def say(self, text: str) -> None:
        self._write(text)

    def close(self, *, keep: bool = True) -> None:
        self._ticker.stop()
