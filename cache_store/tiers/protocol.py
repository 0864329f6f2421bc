"""What a remote store is to us: objects of bytes by name, read by range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from cache_store.entry import EntryHeader
from cache_store.errors import CacheblendError

Bytes = bytes | memoryview


class RemoteError(CacheblendError):
    """A remote that can't be reached, answers late or with an error. Nothing is wrong with what is
    stored; whoever meets one does without the remote."""


class RemoteRefused(RemoteError):
    """A remote that is there and says no: no room left, no permission, no such bucket."""


class LostEntry(CacheblendError):
    """An entry of a remote that can't be used now, for whatever reason: a miss, and nothing that
    would have to be removed."""


class Reader(Protocol):
    """An open entry, whichever tier it comes from. tier: memory, disk or remote."""

    header: EntryHeader
    tier: str

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """K and V of a layer, read-only, each layer checked before it is handed out.

        Raises IntegrityError where it is damaged, LostEntry where a remote fails, IndexError,
        ValueError after `close`.
        """

    def close(self) -> None:
        """Gives the entry back. Views handed out stay good; closing twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ClosingReader:
    """What readers have in common: they are context managers."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Head:
    """An object's length and its first bytes, as many as were asked for or as it has."""

    size: int
    data: Bytes


class Remote(Protocol):
    """Objects by name; names are hex digits and slashes.

    Threads may share one. Every method raises RemoteError and nothing else, and waits no longer for
    an answer than the time-out the remote was made with. An object is put whole or not at all.
    """

    @property
    def address(self) -> str:
        """Where it is, for people: without credentials."""

    def names(self, prefixes: Sequence[str]) -> list[list[str]]:
        """For each prefix, which ends with a slash, the names of the objects beneath it."""

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """Size and first `length` bytes of objects; None for those that aren't there."""

    def get(self, name: str, start: int, length: int) -> Bytes:
        """Bytes [start, start + length) of an object; fewer where it ends before, none where it
        isn't there."""

    def put(self, name: str, data: memoryview) -> None:
        """Puts an object in place, also of one that is there."""

    def delete(self, name: str) -> None:
        """Removes an object if it is there."""

    def close(self) -> None:
        """Gives connections back. Closing twice is fine."""
