"""How fast stored KV comes from a disk and goes to it, found out with temporary files."""

import contextlib
import errno
import mmap
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128

from engine.machine import nearest_existing

FILES = 8  # read side by side, as the chunks of a prompt are
FILE_BYTES = 8 * 2**20  # about as much as a chunk's KV
LAYER_BYTES = 2**18  # of a file, read and checked at once
LONGEST = 0.6  # seconds the writing may take before there are files enough
WARM_RUNS = 3
TRIES = 3


@dataclass(frozen=True)
class DiskRates:
    """Bytes a second, None where they could not be found out; `note` says why.

    folder: where the files were. write: checked, written and brought to the disk. cold: mapped and
    checked, from the disk; warm: likewise, from the page cache. cold_cpu: share of the cold time
    in which a core was busy, not waiting. nbytes: of all files.
    """

    folder: str
    nbytes: int = 0
    write: float | None = None
    cold: float | None = None
    cold_cpu: float = 0.0
    warm: float | None = None
    note: str = ""


def probe_disk(folder: Path) -> DiskRates:
    """Writes and reads nameless files, which no crash can leave behind, in `folder` or, where it
    isn't there, in the nearest folder above it. Where nothing may be written there, in the
    system's own folder for temporary files."""
    notes: list[str] = []
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            there = nearest_existing(place)
            with contextlib.ExitStack() as stack:
                rates = _measure(there, stack)
        except OSError as error:
            notes.append(f"{place}: {error.strerror or error}")
            continue
        if notes:
            notes.append(f"measured in {there} instead")
        return replace(rates, note="; ".join(note for note in (*notes, rates.note) if note))
    return DiskRates(str(folder), note="; ".join(notes))


def _measure(folder: Path, stack: contextlib.ExitStack) -> DiskRates:
    content = memoryview(os.urandom(FILE_BYTES))  # nothing that a file system could compress
    files: list[int] = []
    began = time.perf_counter()
    while len(files) < FILES and time.perf_counter() - began < LONGEST:
        opened = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        file = stack.enter_context(opened).fileno()
        for start in range(0, FILE_BYTES, LAYER_BYTES):
            xxh3_128(content[start : start + LAYER_BYTES]).digest()
        written = 0
        while written < FILE_BYTES:
            written += os.write(file, content[written:])
        os.fsync(file)
        files.append(file)
    nbytes = len(files) * FILE_BYTES
    write = nbytes / (time.perf_counter() - began)
    warm = nbytes / statistics.median(_read(files)[0] for _ in range(WARM_RUNS))
    problem = next((problem for file in files if (problem := _forget(file))), "")
    if problem:
        return DiskRates(str(folder), nbytes, write, warm=warm, note=problem)
    seconds, busy = _read(files)
    return DiskRates(str(folder), nbytes, write, nbytes / seconds, min(1.0, busy / seconds), warm)


def _read(files: list[int]) -> tuple[float, float]:
    """Seconds, and of them those of work, to map the files and check them layer by layer."""
    began, busy = time.perf_counter(), time.thread_time()
    with contextlib.ExitStack() as stack:
        views = []
        for file in files:
            mapped = stack.enter_context(mmap.mmap(file, FILE_BYTES, access=mmap.ACCESS_READ))
            views.append(stack.enter_context(memoryview(mapped)))
        for start in range(0, FILE_BYTES, LAYER_BYTES):
            for view in views:
                with view[start : start + LAYER_BYTES] as layer:
                    xxh3_128(layer).digest()
    return time.perf_counter() - began, time.thread_time() - busy


def _forget(file: int) -> str:
    """Has the page cache drop a file; why it didn't, or ""."""
    if not hasattr(os, "posix_fadvise"):
        return "this system gives no way to read past its page cache"
    for _ in range(TRIES):  # pages that are in somebody's hands stay
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if not _is_cached(file):
            return ""
    return "the page cache kept the files: it may be all the disk there is"


def _is_cached(file: int) -> bool:
    """Whether the middle of a file is in the page cache, as far as that can be asked."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return False
    try:
        os.preadv(file, [bytearray(mmap.PAGESIZE)], FILE_BYTES // 2, flag)
    except BlockingIOError:
        return False  # it would have to wait for the disk
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise
    return True
