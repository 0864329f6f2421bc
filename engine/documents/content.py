"""Between a file and a document: its bytes, and what a format's reader makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.documents.decoding import Decoded, decode
from engine.documents.document import Mark


class Unconvertible(Exception):
    """Raised by a reader for a file it can't read; the message in words for the user, to follow
    the file's name: "is encrypted; save it without its password"."""


@dataclass(frozen=True)
class Content:
    """A whole file. name: its path, or what standard input is called."""

    name: str
    raw: bytes

    @cached_property
    def decoded(self) -> Decoded:
        """Its text. Raises Unconvertible where it is none, or in an encoding that isn't known."""
        decoded = decode(self.raw)
        if decoded is None:
            raise Unconvertible("is text in an encoding that could not be told")
        return decoded

    @property
    def text(self) -> str:
        return self.decoded.text


@dataclass(frozen=True)
class Converted:
    """What becomes a `Document`: see there. kind: where it turned out to be another than was
    thought."""

    text: str
    form: str = "text"
    marks: Sequence[Mark] = ()
    notes: tuple[str, ...] = ()
    kind: str = ""


Reader = Callable[[Content], Converted]
