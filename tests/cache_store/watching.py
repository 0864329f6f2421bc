"""A process that measures a store's folder as fast as it can, with a walk of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tests.cache_store.support import ended, in_child


def measured(root: Path) -> int:
    """Bytes on disk beneath a folder, a file with several names counted once, as `du` does.

    A walk takes its time: what is put in place while it goes on is seen twice, under its old name
    and its new one, unless files are told apart by their number."""
    seen: dict[tuple[int, int], int] = {}
    folders = [os.fspath(root)]
    while folders:
        folder = folders.pop()
        try:
            status = os.lstat(folder)
            items = list(os.scandir(folder))
        except FileNotFoundError:
            continue
        seen[status.st_dev, status.st_ino] = status.st_blocks * 512
        for item in items:
            if item.is_dir(follow_symlinks=False):
                folders.append(item.path)
                continue
            try:
                status = os.lstat(item.path)
            except FileNotFoundError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


@dataclass
class Watched:
    """most: of all measurements, in bytes; looks: how many there were."""

    _memory: SharedMemory
    most: int = 0
    looks: int = 0
    _values: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self._values = self._memory.buf.cast("q")

    def read(self) -> None:
        self.most, self.looks = self._values[0], self._values[1]


@contextmanager
def watching(root: Path) -> Iterator[Watched]:
    """Watches within; what was seen is in the value once it is left."""
    memory = SharedMemory(create=True, size=64)
    values = memory.buf.cast("q")
    for place in range(3):
        values[place] = 0

    def watch() -> None:
        parent = os.getppid()
        while not values[2] and os.getppid() == parent:
            size = measured(root)
            values[0] = max(values[0], size)
            values[1] += 1

    child = in_child(watch)
    watched = Watched(memory)
    try:
        while not values[1]:
            time.sleep(0.001)
        yield watched
    finally:
        values[2] = 1
        ended(child)
        watched.read()
        watched._values.release()
        values.release()
        memory.close()
        memory.unlink()
