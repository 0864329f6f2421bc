"""Lines of a byte stream, of any length of stream: one at a time is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MAX_LINE_BYTES = 64 * 2**20
_AT_ONCE = 2**16  # bytes of one read


class ByteStream(Protocol):
    """What is read: a binary file, or standard input's buffer."""

    def read1(self, size: int, /) -> bytes: ...

    def fileno(self) -> int: ...


@dataclass(frozen=True)
class RawLine:
    """A line without its end. number: counted from 1; too_long: above `MAX_LINE_BYTES`, and `data`
    is empty."""

    number: int
    data: bytes
    too_long: bool = False


class LineReader:
    """`take` gives a line that is here already, `fill` brings more with one read."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._held = bytearray()
        self._searched = 0  # bytes of `_held` that are known to hold no line end
        self._number = 0
        self._dropping = False  # within a line that is too long
        self._at_end = False

    @property
    def ended(self) -> bool:
        """Whether all lines were taken."""
        return self._at_end and not self._held and not self._dropping

    def fileno(self) -> int | None:
        """The descriptor to wait on before `fill`; None for a stream without one."""
        try:
            return self._stream.fileno()
        except (OSError, ValueError):
            return None

    def fill(self) -> None:
        """Reads once, which waits where nothing is there yet. Raises OSError."""
        more = self._stream.read1(_AT_ONCE)
        self._at_end = not more
        self._held += more

    def take(self) -> RawLine | None:
        """The next line; None where `fill` must come first, and at the end."""
        end = self._held.find(b"\n", self._searched)
        if end < 0 and self._at_end and not self.ended:
            end = len(self._held)
        if end < 0:
            if len(self._held) > MAX_LINE_BYTES:
                self._dropping = True
            if self._dropping:
                self._held.clear()
            self._searched = len(self._held)
            return None
        too_long = self._dropping or end > MAX_LINE_BYTES
        data = b"" if too_long else bytes(self._held[:end])
        del self._held[: end + 1]
        self._searched, self._dropping = 0, False
        self._number += 1
        return RawLine(self._number, data, too_long)
