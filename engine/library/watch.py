"""Progress of a download that others do, seen from the bytes that have arrived on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.library.manifest import Progress

_INTERVAL = 0.3  # seconds


@contextmanager
def watched(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """Call `progress("downloading", …)` now and then, from another thread, until done."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_INTERVAL):
            progress("downloading", min(_bytes_below(folder), total), total)

    thread = threading.Thread(target=watch, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except OSError:  # renamed or removed meanwhile
            continue
        # A file may be given its full length at once: what counts is the blocks that are there.
        if path.is_file():
            size += min(status.st_size, getattr(status, "st_blocks", status.st_size) * 512)
    return size
