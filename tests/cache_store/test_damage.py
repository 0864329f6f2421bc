"""Damaged chunk files, in every region of the format: never a wrong byte, never a crash."""

from __future__ import annotations

import contextlib
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128

from cache_store.entry import read_header
from cache_store.errors import DamagedEntry, NotFoundError
from cache_store.store import ChunkStore
from tests.cache_store.support import (
    CONTEXT,
    SPEC,
    file_of,
    files,
    flip,
    make_layers,
    put,
    read,
    scaled,
)

IDS, OTHER = (11, 12, 13, 14, 15), (21, 22, 23, 24, 25)
Damage = tuple[str, bytes]


def flipped(data: bytes, position: int, bit: int) -> bytes:
    harmed = bytearray(data)
    harmed[position] ^= 1 << bit
    return bytes(harmed)


def sealed(header: bytearray, rest: bytes) -> bytes:
    """A header that was altered, under a checksum that fits it."""
    header[16:32] = xxh3_128(bytes(header[:16]) + bytes(header[32:])).digest()
    return bytes(header) + rest


def in_header(data: bytes, start: int) -> Iterator[Damage]:
    """Every bit and every cut of the header, by the region it is in."""
    ends = {8: "magic", 12: "version", 16: "length", 32: "checksum", 72: "fields"}
    for position in range(start):
        name = next((what for end, what in ends.items() if position < end), "strings and ids")
        yield from ((f"bit in {name}", flipped(data, position, bit)) for bit in range(8))
        yield "cut in the header", data[:position]


def in_layers(
    data: bytes, start: int, layer: int, layers: int, dice: random.Random
) -> Iterator[Damage]:
    borders = [start + n * layer for n in range(layers + 1)]
    for border in borders:
        for position in range(border - 4, min(border + 4, len(data))):
            yield from (("bit at a border", flipped(data, position, bit)) for bit in range(8))
        for position in range(border - 9, min(border + 9, len(data))):
            yield "cut at a border", data[:position]
    for position in range(start, len(data)):
        yield "bit in a layer", flipped(data, position, dice.randrange(8))
        yield "cut in a layer", data[:position]
    for size in (1, 7, 64, 512, 4096):
        for begin in range(0, len(data), max(1, size // 2)):
            yield "zeros", data[:begin] + bytes(min(size, len(data) - begin)) + data[begin + size :]
    for one in range(layers):
        for other in range(one + 1, layers):
            pieces = [data[b : b + layer] for b in borders[:-1]]
            pieces[one], pieces[other] = pieces[other], pieces[one]
            yield "layers swapped", data[:start] + b"".join(pieces)
        middle = borders[one] + layer // 2
        k, v = data[borders[one] : middle], data[middle : borders[one + 1]]
        yield "K and V swapped", data[: borders[one]] + v + k + data[borders[one + 1] :]
    for size in (1, 2, 63, 64, layer, 4096, len(data)):
        yield "appended", data + bytes(size)
        yield "appended", data + dice.randbytes(size)


def forged(data: bytes, start: int, dice: random.Random) -> Iterator[Damage]:
    """Headers that say what can't be, with the right checksum."""
    values = (0, 1, 2, 5, 6, 63, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
    for field in range(10):
        for value in (*values, dice.getrandbits(32)):
            header = bytearray(data[:start])
            struct.pack_into("<I", header, 32 + 4 * field, value)
            yield "forged field", sealed(header, data[start:])
    for offset in (8, 12):
        for value in (*values, 64, 128, start - 64, start + 64):
            header = bytearray(data[:start])
            struct.pack_into("<I", header, offset, value % 2**32)
            yield "forged version or length", sealed(header, data[start:])
    for position in range(72, start):
        header = bytearray(data[:start])
        header[position] ^= 1 << dice.randrange(8)
        yield "forged strings, ids and checksums", sealed(header, data[start:])


def anything(data: bytes, dice: random.Random) -> Iterator[Damage]:
    while True:
        harmed = bytearray(data)
        for _ in range(dice.randrange(1, 6)):
            size = dice.randrange(1, 40)
            begin = dice.randrange(len(harmed))
            harmed[begin : begin + size] = dice.randbytes(dice.choice((size, size, 0, 2 * size)))
        yield "anything", bytes(harmed)


def damages(data: bytes, other: bytes, start: int, number: int) -> Iterator[Damage]:
    """`number` of them at least, each region among them; all there are where number allows it."""
    dice = random.Random(7)
    layer = (len(data) - start) // SPEC.layers
    every = [
        *in_header(data, start),
        *in_layers(data, start, layer, SPEC.layers, dice),
        *forged(data, start, dice),
    ]
    few = [("empty", b""), ("another entry's file", other), ("foreign", b"#!/bin/sh\n" * 60)]
    few += [("another's header", other[:start] + data[start:])]
    few += [("another's layers", data[:start] + other[start:])]
    by_kind: dict[str, list[Damage]] = {}
    for damage in every:
        by_kind.setdefault(damage[0], []).append(damage)
    least = [some for kind in by_kind.values() for some in dice.sample(kind, min(3, len(kind)))]
    rest = anything(data, dice)
    dice.shuffle(every)
    yield from few
    yield from least
    yield from every[:number]
    for _ in range(max(number // 10, number + number // 20 - len(every))):
        yield next(rest)


def test_no_damage_gives_a_wrong_answer_or_a_crash(store: ChunkStore) -> None:
    key, other, kept = put(store, IDS), put(store, OTHER, seed=1), put(store, (1, 2), seed=2)
    file = file_of(store, key)
    good, foreign = file.read_bytes(), file_of(store, other).read_bytes()
    right = make_layers(SPEC, len(IDS))
    start = read_header(file).header_bytes
    seen: Counter[str] = Counter()
    for kind, data in damages(good, foreign, start, scaled(550)):
        if data == good:
            continue
        file.write_bytes(data)
        store.damaged.clear()
        match = store.find(SPEC, IDS, CONTEXT)
        if match is None:
            assert [file.name in line or key[:12] in line for line in store.damaged] == [True], kind
        if kind == "forged strings, ids and checksums":
            with contextlib.suppress(DamagedEntry):  # the chunk's id and padding change no KV
                assert read(store, key)[1] == right
        else:
            with pytest.raises((DamagedEntry, NotFoundError)):
                read(store, key)
        seen[kind] += 1
    assert len(seen) >= 16
    assert sum(seen.values()) >= scaled(550)
    print(sum(seen.values()), dict(seen))  # noqa: T201 (the figure, with -s)
    assert read(store, kept)[1] == make_layers(SPEC, 2, 2)  # nothing else was touched
    assert read(store, other)[1] == make_layers(SPEC, len(OTHER), 1)
    store.discard(key)  # as a prompt that meets damage in a layer does; `put` reads no layers
    assert put(store, IDS) == key
    assert read(store, key)[1] == right
    assert store.verify().problems == ()


def test_verify_names_each_and_repair_takes_no_other(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**26) as store:
        keys = [put(store, (n, n + 1, n + 2)) for n in range(scaled(24))]
        dice = random.Random(3)
        bad = set(dice.sample(keys, len(keys) // 2))
        for number, key in enumerate(sorted(bad)):
            file = file_of(store, key)
            data = file.read_bytes()
            if number % 3 == 0:
                file.write_bytes(data[: dice.randrange(len(data))])
            elif number % 3 == 1:
                file.write_bytes(flipped(data, dice.randrange(len(data)), dice.randrange(8)))
            else:
                file.unlink()
        assert {problem.where for problem in store.verify().problems} == bad
        report = store.verify(repair=True)
        assert (report.repaired, len(report.problems)) == (len(bad), len(bad))
        assert store.verify().problems == ()
        assert {entry.key for entry in store.entries()} == set(keys) - bad


def test_what_is_stored_anew_in_the_place_of_one_in_use_is_found(store: ChunkStore) -> None:
    key = put(store, IDS)
    flip(file_of(store, key), -1)
    with ChunkStore.open(store.path) as other, other.open_entry(key):
        assert store.discard(key) == 0  # another process reads it
        assert not store.contains(SPEC, IDS, CONTEXT)
        assert put(store, IDS) == key
        assert store.contains(SPEC, IDS, CONTEXT)
        before = files(store)
        put(store, IDS)
        assert files(store) == before  # not written again and again
