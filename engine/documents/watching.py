"""What changes in folders, and which files are to be read again for it.

That something has changed the system tells; what has, a new walk does, so that files come and go
by the same rules as before, whatever an editor or a rename does to them on the way.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.documents.document import Found, FoundFile
from engine.documents.ignoring import KINDS

# A burst, such as a checkout, is one change once it is quiet for so long, or has gone on so long.
QUIET_MS = 300
BURST_MS = 3000
LOOK_SECONDS = 1.0  # between two looks at what the system doesn't tell of
POLL_MS = 2000  # where the system can't tell
REPLACED_SECONDS = 0.2  # that a file may be away while an editor replaces it

Facts = tuple[int, int, int]
"""Size, time in nanoseconds and inode of a file."""


@dataclass(frozen=True)
class Changes:
    """found: what is to be read now, and what is new of what cannot be read or is left out; gone:
    sources of files that are there no more, or are left out now."""

    found: tuple[Found, ...]
    gone: tuple[str, ...]

    @property
    def any(self) -> bool:
        return bool(self.gone) or any(isinstance(item, FoundFile) for item in self.found)


@dataclass
class Known:
    """The files as they were when they were last found, and what else was found."""

    files: dict[str, tuple[FoundFile, Facts | None]] = field(default_factory=dict)
    others: set[Found] = field(default_factory=set)

    def note(self, found: Iterable[Found]) -> Iterator[Found]:
        """Passes a walk on, and remembers it."""
        for item in found:
            if not isinstance(item, FoundFile):
                self.others.add(item)
            elif item.path is not None:
                self.files[item.source] = item, facts_of(item.path)
            yield item

    def changes(self, found: Iterable[Found], lost: Sequence[Path] = ()) -> Changes:
        """What is other than it was, of a new walk, which is what is known from now on. lost:
        folders that are away as a whole, as on a disk that was taken out: what was in them
        stays."""
        before, others = self.files, self.others
        self.files, self.others = {}, set()
        changed: list[Found] = []
        for item in self.note(found):
            if not isinstance(item, FoundFile):
                changed += [item] if item not in others else []
            elif item.source not in before or before[item.source][1] != self._facts(item.source):
                changed.append(item)
        missing = {source for source in before if source not in self.files}
        for source in missing:
            if any(_lies_in(source, os.fspath(folder)) for folder in lost):
                self.files[source] = before[source]
        missing -= self.files.keys()
        back = _come_back([before[source][0] for source in before if source in missing])
        for item in back:
            changed += self.note([item])
        gone = tuple(source for source in before if source in missing - self.files.keys())
        return Changes(tuple(changed), gone)

    def forget(self, changes: Changes) -> None:
        """Changes that nothing came of count as such once more."""
        for item in changes.found:
            if isinstance(item, FoundFile):
                self.files[item.source] = item, None
        for source in changes.gone:
            self.files[source] = FoundFile(source, Path(source), named=False), None

    def _facts(self, source: str) -> Facts | None:
        return self.files[source][1]


def facts_of(path: Path) -> Facts | None:
    """None where it can't be looked at."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _come_back(files: list[FoundFile]) -> list[FoundFile]:
    """Those of the files that were away only while they were replaced."""
    away = [file for file in files if file.path is not None and facts_of(file.path) is None]
    if not away:
        return []
    time.sleep(REPLACED_SECONDS)
    return [file for file in away if file.path is not None and facts_of(file.path) is not None]


class Watch:
    """Tells when something changes in folders, or of files that were typed. A context manager.

    hidden: changes of hidden files count too.
    """

    def __init__(self, paths: Iterable[Path], *, hidden: bool) -> None:
        paths = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100
        self.folders = [path for path in paths if path.is_dir()]
        self._files = [path for path in paths if not path.is_dir()]
        self._hidden = hidden
        self._looks = self._look()
        self._devices = {folder: folder.stat().st_dev for folder in self.folders}
        self._told: queue.Queue[BaseException | None] = queue.Queue()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Until something has changed; False where nothing has for so many seconds. Signals come
        through. Raises what the watching has failed of."""
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or time.monotonic() < until:
            try:
                error = self._told.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._look_again():
                    return True
                continue
            if error is not None:
                raise error
            while not self._told.empty():
                self._told.get()
            self._look_again()
            return True
        return False

    def lost(self) -> list[Path]:
        """Folders that are away, or lie on another disk than they did."""
        found = []
        for folder, device in self._devices.items():
            facts = _device(folder)
            if facts != device:
                found.append(folder)
        return found

    def _look(self) -> list[object]:
        """What the system doesn't tell of: typed files, and folders that are made anew."""
        folders: list[object] = [_inode(folder) for folder in self.folders]
        return [folders, *(facts_of(path) for path in self._files)]

    def _look_again(self) -> bool:
        looks = self._look()
        if looks == self._looks:
            return False
        before, self._looks = self._looks, looks
        if looks[0] != before[0]:
            self._stop()
            self._listen()
        return True

    def _listen(self) -> None:
        folders = [folder for folder in self.folders if folder.is_dir()]
        if folders:
            self._end = threading.Event()
            self._thread = threading.Thread(
                target=self._tell, args=(folders, self._end), daemon=True
            )
            self._thread.start()

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(3 * LOOK_SECONDS)
        self._thread = None

    def _tell(self, folders: list[Path], end: threading.Event) -> None:
        """A thread's whole life: puts each change into the queue."""
        from watchfiles import watch

        for polling in (False, True):  # as where the system has no more watches to give
            try:
                for _ in watch(
                    *folders,
                    watch_filter=lambda change, path: self._counts(path),
                    debounce=BURST_MS,
                    step=QUIET_MS,
                    rust_timeout=int(LOOK_SECONDS * 1000),
                    stop_event=end,
                    raise_interrupt=False,
                    ignore_permission_denied=True,
                    force_polling=polling or None,
                    poll_delay_ms=POLL_MS,
                ):
                    self._told.put(None)
                return
            except Exception as error:  # to be raised where somebody waits
                if polling:
                    self._told.put(error)

    def _counts(self, path: str) -> bool:
        """Whether a change of this path may be one of what is read."""
        if self._hidden:
            return True
        folder = next((str(f) for f in self.folders if _lies_in(path, str(f))), "")
        parts = path[len(folder) :].strip("/").split("/")
        return parts[-1] in KINDS or not any(part.startswith(".") for part in parts)


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lies_in(path: str, folder: str) -> bool:
    folder = folder.rstrip("/")
    return path == folder or path.startswith(folder + "/")
