"""Locks on a store's folder, which a process that dies gives back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from cache_store.database import BUSY_SECONDS
from cache_store.errors import StoreBusy

_POLL_SECONDS = 0.005


@contextlib.contextmanager
def folder_lock(folder: Path, *, alone: bool, patience: float = BUSY_SECONDS) -> Iterator[None]:
    """Held by whoever writes to a store's databases, together with others, and alone by whoever
    puts a new database in the place of a damaged one: what is written to the old file is lost.

    patience: how many seconds to wait for it. Raises StoreBusy where it can't be had, OSError as
    the disk does. Where folders can't be locked, there is none.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            _take(descriptor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, folder, patience)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def close_lock(folder: Path) -> Iterator[None]:
    """The same to close a database, which writes its log back; done without where it can't be
    had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, StoreBusy):
            stack.enter_context(folder_lock(folder, alone=False))
        yield


def _take(descriptor: int, kind: int, folder: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreBusy(
                    f"{folder} is in use by another process",
                    "wait for it to finish, then try again",
                ) from None
        time.sleep(_POLL_SECONDS)
