"""A layer's bytes: whether they are what the header says, and which are K and which V."""

from __future__ import annotations

from xxhash import xxh3_128

from cache_store.entry import EntryHeader
from cache_store.errors import DamagedEntry

Layers = list[tuple[memoryview, memoryview]]


def layer_bytes(header: EntryHeader) -> int:
    """Bytes of one layer."""
    return header.spec.layer_bytes(len(header.token_ids))


def is_layer(header: EntryHeader, index: int, data: memoryview) -> bool:
    """Whether these are the bytes of a layer, all of them."""
    return data.nbytes == layer_bytes(header) and xxh3_128(data).digest() == header.checksums[index]


def parts(header: EntryHeader, data: memoryview) -> tuple[memoryview, memoryview]:
    """K and V of a layer."""
    k_bytes, _ = header.spec.part_bytes(len(header.token_ids))
    return data[:k_bytes], data[k_bytes:]


def layers_of_file(header: EntryHeader, data: memoryview) -> Layers:
    """All layers of a whole chunk file. Raises DamagedEntry for the first that isn't as written."""
    size = layer_bytes(header)
    found: Layers = []
    for index in range(header.spec.layers):
        start = header.header_bytes + index * size
        layer = data[start : start + size]
        if not is_layer(header, index, layer):
            raise DamagedEntry(f"entry {header.key[:12]} is damaged in layer {index}")
        found.append(parts(header, layer))
    return found
