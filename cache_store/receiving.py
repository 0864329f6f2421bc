"""A chunk file that comes from elsewhere: written as it comes, and checked before it counts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from cache_store.database import guarded
from cache_store.disk import StagedFile
from cache_store.entry import EntryHeader, EntryReader
from cache_store.errors import DamagedEntry

_CHUNK_ID = re.compile(r"(?:[0-9a-f]{64})?")


def receive_entry(staged: StagedFile, pieces: Iterable[bytes], checksum: bytes) -> EntryHeader:
    """Writes the pieces to an empty file and checks header and layers; the header.

    checksum: that the header is to have, which covers those of the layers. Raises DamagedEntry.
    """
    place = 0
    for piece in pieces:
        with guarded(staged.path):
            data = memoryview(piece)
            while data:
                written = os.pwrite(staged.descriptor, data, place)
                data, place = data[written:], place + written
    with guarded(staged.path):
        staged.sync()
    with EntryReader(staged.path) as reader:
        reader.verify()
        if reader.header_checksum != checksum:
            raise DamagedEntry("it has another checksum than was said")
        if not _CHUNK_ID.fullmatch(reader.header.chunk_id):
            raise DamagedEntry("it names its chunk as no chunk is named")
        return reader.header
