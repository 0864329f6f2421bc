"""Write-back: what the remote is still to be given, kept in the catalog until it has it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from cache_store.catalog import Catalog
from cache_store.errors import CacheblendError
from cache_store.tiers.protocol import RemoteError, RemoteRefused

Sending = Literal["sent", "there", "gone"]
"""What became of an entry: the remote was given it, had it already, or it isn't here any more."""

_AT_ONCE = 64
_LISTED_AT_ONCE = 1000
_PAUSE_SECONDS = 1.0
_FAILURES = 3  # in a row, after which this process leaves it


class Uploads:
    """Entries to be uploaded, and the thread that does it.

    An entry is on the list before it is in the store, and off it once the remote has it, so that a
    process that dies loses nothing: the next one that writes goes on.

    send: gives the remote an entry, or finds it there already or gone from here; raises
    RemoteError. told: whether the user knows of a failure already. on_end: called in the thread
    when it ends.
    """

    def __init__(
        self,
        catalog: Catalog,
        send: Callable[[str], Sending],
        note: Callable[[str], None],
        told: Callable[[str], bool] = lambda why: False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog, self._send, self._note, self._on_end = catalog, send, note, on_end
        self._told = told
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._gave_up: RemoteError | None = None
        self._coming: Counter[str] = Counter()  # being stored
        self._failed: set[str] = set()  # not tried again by this process
        self._trial = False  # the first failure is the last, unless something was done before it
        self.done: Counter[Sending] = Counter()

    def pending(self) -> int:
        """How many entries are still to be uploaded, by whichever process."""
        return int(self._catalog.ask("SELECT count(*) FROM upload")[0][0])

    def add(self, keys: Iterable[str]) -> None:
        """Puts entries on the list. Raises StoreFullError where many don't fit."""
        rows = [(key,) for key in sorted(keys)]  # neighbours in the database, too
        for start in range(0, len(rows), _LISTED_AT_ONCE):
            some = rows[start : start + _LISTED_AT_ONCE]
            few = len(some) <= _AT_ONCE  # within what stores leave for small changes
            room = contextlib.nullcontext() if few else self._catalog.growing(400 * len(some))
            with room, self._catalog.writing(count=False) as db:
                db.executemany("INSERT OR IGNORE INTO upload VALUES (?)", some)

    @contextlib.contextmanager
    def adding(self, key: str) -> Iterator[None]:
        """Within, an entry is stored: it is on the list before it is there, so that it isn't
        forgotten, and left alone until then. It is listed again afterwards, for another process
        may have found nothing to upload meanwhile."""
        with self._change:
            self._coming[key] += 1
        try:
            self.add([key])
            yield
            self.add([key])
        finally:
            with self._change:
                self._coming -= Counter([key])
        self.start()

    def start(self) -> None:
        """Has the thread work, unless the remote failed too often already."""
        with self._change:
            if self._stopping or self._gave_up is not None:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remote-upload", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def retry(self) -> None:
        """As `start`, also after failures. A remote that answers nothing at all is asked once."""
        with self._change:
            self._gave_up = None
            self._trial = not self.done
            self._failed.clear()
        self.start()

    def _run(self) -> None:
        try:
            failures = 0
            while not self._stopping and self._gave_up is None:
                keys = self._next()
                if not keys:
                    with self._change:
                        self._change.notify_all()
                        if self._stopping:
                            return
                        self._change.wait(_PAUSE_SECONDS)
                    continue
                for key in keys:
                    if self._stopping:
                        return
                    try:
                        sending = self._send(key)
                    except RemoteError as error:
                        failures += 1
                        if isinstance(error, RemoteRefused):
                            self._failed.add(key)
                        with self._change:
                            if failures >= _FAILURES or self._trial:
                                self._gave_up = error
                            elif not isinstance(error, RemoteRefused):
                                self._change.wait(_PAUSE_SECONDS)
                        break
                    failures = 0
                    self._done(key, sending)
        except CacheblendError as error:  # of the catalog: what is on the list stays on it
            self._gave_up = RemoteError(error.message, error.hint)
        finally:
            self._on_end()
            with self._change:
                self._thread = None
                self._change.notify_all()

    def _next(self) -> list[str]:
        with self._change:
            apart = self._failed | set(self._coming)
        rows = self._catalog.ask(f"SELECT key FROM upload LIMIT {_AT_ONCE + len(apart)}")
        return [str(key) for (key,) in rows if key not in apart]

    def _done(self, key: str, sending: Sending) -> None:
        with self._catalog.writing(count=False) as db:
            db.execute("DELETE FROM upload WHERE key = ?", (key,))
        with self._change:
            self.done[sending] += 1
            self._trial = False
            self._change.notify_all()

    def wait(
        self, seconds: float | None = None, on_left: Callable[[int], None] = lambda left: None
    ) -> int:
        """Waits until all is uploaded, it failed, or the time is over; how many are left.

        on_left: told how many are left, now and then.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = self.pending()
            on_left(left)
            with self._change:
                late = until is not None and time.monotonic() >= until
                stuck = self._thread is None or left <= len(self._failed)
                if not left or late or stuck:
                    return left
                self._change.wait(0.1 if until is None else min(0.1, until - time.monotonic()))

    @property
    def failure(self) -> RemoteError | None:
        """Why nothing more is uploaded by this process."""
        return self._gave_up

    def close(self, seconds: float) -> int:
        """Waits so long at most, then stops; how many are left, which is noted."""
        running = self._thread is not None or self._gave_up is not None
        left = self.wait(seconds) if running else 0
        with self._change:
            self._stopping = True
            self._change.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        if left:
            failure = self._gave_up
            new = failure is not None and not self._told(failure.message)
            why = f": {failure.message.rstrip('.')}" if failure is not None and new else ""
            self._note(f"{left} entries are still to be uploaded{why} (cacheblend store push)")
        return left
