"""Whole entries, to and from a remote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cache_store.entry import EntryHeader, EntryReader, header_length, parse_header
from cache_store.errors import DamagedEntry
from cache_store.tiers.layers import Layers, layers_of_file
from cache_store.tiers.naming import entry_name
from cache_store.tiers.protocol import LostEntry

if TYPE_CHECKING:
    from cache_store.tiers.remote import RemoteTier

_FIRST_READ = 2**14
_AHEAD = 4

Place = tuple[str, str]
"""Group and key of an entry."""


def send(remote: RemoteTier, reader: EntryReader) -> bool:
    """Gives the remote an entry; False where it was there already. Every byte is checked first, so
    that damage doesn't spread. Raises DamagedEntry, RemoteError."""
    reader.verify()
    header = reader.header
    name = entry_name(header.group, header.key)
    new = True
    if not remote.is_damaged(header.key):
        (head,) = remote.slow.heads([name], 1)
        new = head is None or head.size != header.file_bytes
    if new:
        remote.slow.put(name, reader.file)
    remote.added(header.group, header.key)
    return new


def download(remote: RemoteTier, place: Place) -> tuple[EntryHeader, Layers]:
    """A whole entry, every byte checked. Raises RemoteError, LostEntry for one that is gone,
    DamagedEntry for anything but the entry."""
    group, key = place
    name = entry_name(group, key)
    (head,) = remote.slow.heads([name], _FIRST_READ)
    if head is None:
        remote.forget(group, key)
        raise LostEntry(f"entry {key[:12]} is gone from {remote.address}")
    length = header_length(head.data, head.size, name)
    data = memoryview(remote.slow.get(name, 0, head.size)).cast("B")
    if data.nbytes != head.size:
        raise DamagedEntry(f"entry {key[:12]} at {remote.address} is cut short")
    header = parse_header(data[:length], head.size, name)
    if (header.group, header.key) != place:
        raise DamagedEntry(f"entry {key[:12]} at {remote.address} is another")
    return header, layers_of_file(header, data)


def downloads(
    remote: RemoteTier, places: Iterable[Place]
) -> Iterator[tuple[Place, Future[tuple[EntryHeader, Layers]]]]:
    """Downloads under way, a few ahead of the one that is waited for, until the remote isn't asked
    any more."""
    ahead: list[tuple[Place, Future[tuple[EntryHeader, Layers]]]] = []

    def begin(place: Place) -> None:
        ahead.append((place, remote.submit(lambda: download(remote, place))))

    for place in places:
        if not remote.asked:
            break
        begin(place)
        if len(ahead) >= _AHEAD:
            yield ahead.pop(0)
    yield from ahead
