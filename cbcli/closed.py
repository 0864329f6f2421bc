"""What stands for a standard output that the caller closed."""

from __future__ import annotations

import io
import os
from typing import Any, NoReturn

from cache_store.errors import CacheblendError


class ClosedStream(io.TextIOBase):
    """Refuses whatever is written to it: nothing of it would get anywhere."""

    def __init__(self) -> None:
        # The descriptor is taken: else the next file opened, such as one of the store, would be
        # what libraries take for standard output.
        self._place = os.open(os.devnull, os.O_WRONLY)

    @property
    def buffer(self) -> ClosedStream:
        return self

    def write(self, data: Any, /) -> NoReturn:
        raise CacheblendError("standard output is closed", "send it somewhere, as to /dev/null")
