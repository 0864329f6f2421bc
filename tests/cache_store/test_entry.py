import gc
import os
import struct
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.disk import lock_unused
from cache_store.entry import (
    ALIGNMENT,
    EntryHeader,
    EntryReader,
    predicted_file_bytes,
    read_header,
    write_entry,
)
from cache_store.errors import DamagedEntry, IntegrityError
from cache_store.keys import KVSpec
from tests.cache_store.support import SPEC, change, copy, flip, make_layers

SMALL = replace(SPEC, model="m", tokenizer="t", layers=2, kv_heads=1, head_dim=2)
HEADER = EntryHeader(SMALL, (7, 8), (1, 2, 3), "short", "c")


def write(path: Path, header: EntryHeader = HEADER, seed: int = 0) -> Path:
    with path.open("wb") as file:
        write_entry(file.fileno(), header, make_layers(header.spec, len(header.token_ids), seed))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "entry.kv")


def fully_read(path: Path) -> None:
    with EntryReader(path) as reader:
        reader.verify()


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("context", [(), (1,), tuple(range(100))])
def test_what_is_read_is_what_was_written(
    tmp_path: Path, tokens: int, context: tuple[int, ...]
) -> None:
    header = EntryHeader(SPEC, tuple(range(tokens)), context, "längere", "id")
    path = write(tmp_path / "entry.kv", header)
    with EntryReader(path) as reader:
        assert replace(reader.header, checksums=()) == header
        assert reader.header == read_header(path)
        assert copy(reader) == make_layers(SPEC, tokens)
    size = path.stat().st_size
    assert size == header.file_bytes
    assert size == predicted_file_bytes(SPEC, tokens, len(context), "längere", "id")


def test_layers_are_aligned_and_one_after_the_other(path: Path) -> None:
    data = path.read_bytes()
    start = HEADER.header_bytes
    assert start % ALIGNMENT == 0
    assert data[start:] == b"".join(k + v for k, v in make_layers(SMALL, 2))


def test_any_contiguous_buffer_can_be_stored(tmp_path: Path) -> None:
    k, v = (
        array("f", [1, 2, 3, 4]),
        memoryview(array("i", [5, 6, 7, 8])).cast("B").cast("f", (2, 2)),
    )
    path = tmp_path / "entry.kv"
    with path.open("wb") as file:
        write_entry(file.fileno(), HEADER, [(k, v), (v, k)])
    with EntryReader(path) as reader:
        assert [bytes(part) for part in reader.layer(0)] == [k.tobytes(), v.tobytes()]


def test_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    layers = make_layers(SMALL, 2)
    with (tmp_path / "entry.kv").open("wb") as file:
        for wrong, what in (
            (layers[:1], "1 layers given, 2 expected"),
            ([layers[0], (layers[1][0], layers[1][1][:-1])], "V of layer 1"),
            ([(memoryview(layers[0][0] * 2)[::2], layers[0][1]), layers[1]], "contiguous"),
        ):
            with pytest.raises(ValueError, match=what):
                write_entry(file.fileno(), HEADER, wrong)


def test_a_cut_at_any_byte_is_found(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    cut = tmp_path / "cut.kv"
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(DamagedEntry, match=r"cut\.kv"):
            EntryReader(cut)
        with pytest.raises(DamagedEntry, match=r"cut\.kv"):
            read_header(cut)


def test_a_longer_file_is_found(path: Path) -> None:
    change(path, lambda data: data.append(0))
    with pytest.raises(DamagedEntry, match="instead of"):
        EntryReader(path)


def test_a_flipped_bit_anywhere_is_found(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    flipped = tmp_path / "flipped.kv"
    for position in range(len(data)):
        wrong = bytearray(data)
        wrong[position] ^= 1 << position % 8
        flipped.write_bytes(wrong)
        with pytest.raises(DamagedEntry, match=r"flipped\.kv"):
            fully_read(flipped)
        if position < HEADER.header_bytes:
            with pytest.raises(DamagedEntry, match=r"flipped\.kv"):
                read_header(flipped)


@given(st.binary(max_size=600), st.integers(0, 600))
def test_no_bytes_can_do_worse_than_be_refused(data: bytes, kept: int) -> None:
    good = _good_bytes()
    path = Path(os.environ["HOME"]) / "any.kv"
    path.write_bytes(good[:kept] + data)
    if path.read_bytes() != good:
        with pytest.raises(DamagedEntry):
            fully_read(path)


def _good_bytes() -> bytes:
    return write(Path(os.environ["HOME"]) / "good.kv").read_bytes()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=10, max_size=10))
def test_impossible_headers_with_right_checksums_are_refused(fields: list[int]) -> None:
    from xxhash import xxh3_128

    data = bytearray(_good_bytes())
    struct.pack_into("<10I", data, 32, *fields)
    length = HEADER.header_bytes
    data[16:32] = xxh3_128(data[:16] + data[32:length]).digest()
    path = Path(os.environ["HOME"]) / "impossible.kv"
    path.write_bytes(data)
    with pytest.raises(DamagedEntry):
        EntryReader(path)


def test_another_format_version_is_named(path: Path) -> None:
    change(path, lambda data: struct.pack_into("<I", data, 8, 2))
    with pytest.raises(DamagedEntry, match="format version 2, this is 1"):
        EntryReader(path)


def test_foreign_files_are_refused(tmp_path: Path, path: Path) -> None:
    link, fifo, folder = tmp_path / "link.kv", tmp_path / "fifo.kv", tmp_path / "folder.kv"
    link.symlink_to(path)
    os.mkfifo(fifo)
    folder.mkdir()
    text = tmp_path / "text.kv"
    text.write_text("just some text that somebody left here")
    for wrong in (link, fifo, folder, text, tmp_path / "missing.kv"):
        for reads in (EntryReader, read_header):
            with pytest.raises(DamagedEntry, match=wrong.name):
                reads(wrong)
    assert issubclass(DamagedEntry, IntegrityError)


def test_a_damaged_layer_says_which_and_spares_the_others(path: Path) -> None:
    flip(path, HEADER.header_bytes + SMALL.layer_bytes(2))
    with EntryReader(path) as reader:
        assert bytes(reader.layer(0)[0]) == make_layers(SMALL, 2)[0][0]
        for _ in range(2):  # asking again doesn't make it good
            with pytest.raises(DamagedEntry, match="layer 1"):
                reader.layer(1)


def test_a_damaged_file_is_in_use_no_longer_than_its_reader(path: Path) -> None:
    flip(path, -1)
    with EntryReader(path) as reader, pytest.raises(DamagedEntry) as error:
        reader.verify()
    lock = lock_unused(path)
    assert lock is not None
    os.close(lock)
    assert error.value.__traceback__ is not None


def test_views_outlive_the_reader(path: Path) -> None:
    reader = EntryReader(path)
    k, v = reader.layer(1)
    reader.close()
    reader.close()
    path.unlink()
    del reader
    gc.collect()
    assert (bytes(k), bytes(v)) == make_layers(SMALL, 2)[1]
    assert k.readonly


def test_what_a_reader_cannot_give(path: Path) -> None:
    reader = EntryReader(path)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            reader.layer(index)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.layer(0)


def test_closing_is_told_once(path: Path) -> None:
    told: list[int] = []
    with EntryReader(path, on_close=lambda: told.append(1)) as reader:
        assert not told
    reader.close()
    assert told == [1]
    EntryReader(path, on_close=lambda: told.append(2))
    gc.collect()
    assert told == [1, 2]


def test_no_descriptor_is_kept(path: Path) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/dev/fd").iterdir())

    before = descriptors()
    readers = [EntryReader(path) for _ in range(10)]
    for reader in readers:
        reader.verify()
        reader.close()
    with pytest.raises(DamagedEntry):
        EntryReader(path.with_name("none.kv"))
    assert descriptors() <= before


def test_reading_is_as_fast_as_memory(tmp_path: Path) -> None:
    spec = KVSpec("m", "t", layers=8, kv_heads=8, head_dim=128, dtype="bf16")
    header = EntryHeader(spec, tuple(range(500)), (), "", "")
    path = write(tmp_path / "entry.kv", header)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        fully_read(path)
        best = min(best, time.perf_counter() - started)
    assert path.stat().st_size / best > 1e9  # bytes a second; it reaches ten times that
