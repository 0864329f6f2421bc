"""The last few traces, in a folder of their own."""

from __future__ import annotations

import re
import time
from pathlib import Path

from engine.trace.file import SUFFIX, write
from engine.trace.record import Trace

_OURS = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{4}\.cbtrace")
_STALE_SECONDS = 3600.0


def keep(trace: Trace, folder: Path, count: int) -> Path:
    """Writes a trace to the folder, made where it isn't there, and removes all but the newest
    `count`. Files of other names are left alone. Raises what `write` does."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / (trace.id + SUFFIX)
    write(trace, path)
    others = [other for other in kept(folder) if other.name != path.name]
    for old in others[max(0, count - 1) :]:
        old.unlink(missing_ok=True)
    for part in folder.glob(f".*{SUFFIX}.part"):  # of a process that was killed
        try:
            if part.stat().st_mtime < time.time() - _STALE_SECONDS:
                part.unlink()
        except FileNotFoundError:
            pass
    return path


def kept(folder: Path) -> list[Path]:
    """The traces there, newest first; none where there is no folder."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _OURS.fullmatch(p.name)), reverse=True)
