"""The bandwidth that stored KV came at lately, kept between runs for each store."""

import json
import math
from contextlib import suppress
from pathlib import Path

from engine.files import replace_file

LATELY = 0.5  # share of the newest measurement in what is remembered
MOST = 64  # stores that are remembered
LEAST_BYTES = 2**20  # less than that says little


class Bandwidth:
    """Bytes a second of one store. file: JSON, made when something is first seen; one that can't
    be read is as good as none, and one that can't be written is left."""

    def __init__(self, file: Path, store: Path) -> None:
        self._file, self._store = file, str(store)

    def latest(self) -> float | None:
        """What was seen lately, None before anything was."""
        return self._read().get(self._store)

    def saw(self, nbytes: int, seconds: float) -> None:
        """Remembers that so many bytes took so long."""
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        known = self._read()
        rate, before = nbytes / seconds, known.pop(self._store, None)
        if before is not None:
            rate = LATELY * rate + (1 - LATELY) * before
        kept = dict(list(known.items())[1 - MOST :])
        self._write(kept | {self._store: rate})

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self._file.read_text("utf-8"))
            items = {str(name): float(rate) for name, rate in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        return {name: rate for name, rate in items.items() if math.isfinite(rate) and rate > 0}

    def _write(self, known: dict[str, float]) -> None:
        with suppress(OSError):
            replace_file(self._file, json.dumps(known))
