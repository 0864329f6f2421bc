"""The chunk file: one chunk's KV with all that is needed to know whether it may be used.

    0   magic "CBCHUNK\\0", version u32, header bytes u32
    16  xxh3_128 of the header without these 16 bytes
    32  layers, kv_heads, head_dim, dtype, tokens, context tokens, and the lengths of the four
        strings, all u32; then the strings model, tokenizer, regime, chunk id; token ids and
        context token ids, u32 each; one xxh3_128 a layer; zeros up to a multiple of 64
    then, a layer after the other, K and V, each [tokens, kv_heads, head_dim], nothing between

dtype is 0 bf16, 1 fp16, 2 fp32, 3 fp8 (e4m3), 4 int8, 5 int4. In the last three a number is
base + step * code, code being a signed e4m3 number, 0 to 255 or 0 to 15; and K and V are each

    steps, bf16; then as many bases, bf16; then the codes; zeros up to a multiple of 64

A channel is one of a head's dimensions, a group `GROUP` in number, the last one what is left.
K has a step for each group of tokens and channel, [groups, kv_heads * head_dim], V for each group
of channels, [tokens, kv_heads, groups of head_dim]. Codes are in the order of the numbers, a byte
each; of int4, two in a byte: of a run of n numbers, byte i has number i in its low four bits and
number ceil(n / 2) + i in the high ones (0 if there is none). A run is all of a token's K, and one
group of channels of its V.

All numbers are little-endian. Every byte of the file is under a checksum and its length is known
from the header, so neither a flipped bit nor a cut goes unseen. Files are never changed in place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, cast, get_args

from xxhash import xxh3_128

from cache_store.errors import CacheblendError, DamagedEntry, UnreadableEntry
from cache_store.keys import (
    FORMAT_VERSION,
    DType,
    KVSpec,
    entry_key,
    group_key,
    pack_ids,
    unpack_ids,
)

MAGIC = b"CBCHUNK\0"
ALIGNMENT = 64
_START = struct.Struct("<8sII16s")
_FIELDS = struct.Struct("<10I")
_DTYPES: tuple[DType, ...] = get_args(DType)
_CHECKSUM_BYTES = 16
_MAX_HEADER = 2**28
_FIRST_READ = 2**14  # as much as nearly every header takes: one read instead of two


@dataclass(frozen=True)
class EntryHeader:
    """What a chunk file says of itself. checksums: one xxh3_128 digest a layer."""

    spec: KVSpec
    token_ids: tuple[int, ...]
    context: tuple[int, ...]
    regime: str
    chunk_id: str
    checksums: tuple[bytes, ...] = ()

    @cached_property
    def group(self) -> str:
        return group_key(self.spec, self.token_ids)

    @cached_property
    def key(self) -> str:
        return entry_key(self.group, self.context, self.regime)

    @cached_property
    def header_bytes(self) -> int:
        """Offset of the first layer."""
        return _header_bytes(self.spec, len(self.token_ids), len(self.context), self._strings)

    @cached_property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.header_bytes + self.spec.layers * self.spec.layer_bytes(len(self.token_ids))

    @property
    def _strings(self) -> list[bytes]:
        spec = self.spec
        return [text.encode() for text in (spec.model, spec.tokenizer, self.regime, self.chunk_id)]

    def encode(self, checksums: Sequence[bytes]) -> bytes:
        """The header's bytes, `header_bytes` of them."""
        spec, strings = self.spec, self._strings
        body = b"".join(
            (
                _FIELDS.pack(
                    spec.layers,
                    spec.kv_heads,
                    spec.head_dim,
                    _DTYPES.index(spec.dtype),
                    len(self.token_ids),
                    len(self.context),
                    *map(len, strings),
                ),
                *strings,
                pack_ids(self.token_ids),
                pack_ids(self.context),
                *checksums,
            )
        ).ljust(self.header_bytes - _START.size, b"\0")
        start = _START.pack(MAGIC, FORMAT_VERSION, self.header_bytes, b"")[:16]
        return start + xxh3_128(start + body).digest() + body


def predicted_file_bytes(
    spec: KVSpec, tokens: int, context_tokens: int = 0, regime: str = "", chunk_id: str = ""
) -> int:
    """Length of the file an entry of that many tokens would have."""
    strings = [text.encode() for text in (spec.model, spec.tokenizer, regime, chunk_id)]
    header = _header_bytes(spec, tokens, context_tokens, strings)
    return header + spec.layers * spec.layer_bytes(tokens)


def _header_bytes(spec: KVSpec, tokens: int, context_tokens: int, strings: list[bytes]) -> int:
    used = _START.size + _FIELDS.size + sum(map(len, strings)) + 4 * (tokens + context_tokens)
    return -(-(used + spec.layers * _CHECKSUM_BYTES) // ALIGNMENT) * ALIGNMENT


def write_entry(descriptor: int, header: EntryHeader, layers: Sequence[tuple[Any, Any]]) -> None:
    """Writes a whole chunk file to an empty, writable file.

    layers: K and V of each layer as C-contiguous buffers, as the file has them. Raises ValueError
    where their number or size differs from what the header says, OSError as the disk does.
    """
    spec, tokens = header.spec, len(header.token_ids)
    if len(layers) != spec.layers:
        raise ValueError(f"{len(layers)} layers given, {spec.layers} expected")
    sizes = spec.part_bytes(tokens)
    checksums = []
    offset = header.header_bytes
    for index, pair in enumerate(layers):
        checksum = xxh3_128()
        for name, size, values in zip("KV", sizes, pair, strict=True):
            data = _bytes_of(values)
            if data.nbytes != size:
                raise ValueError(f"{name} of layer {index} has {data.nbytes} bytes, not {size}")
            checksum.update(data)
            _write_at(descriptor, data, offset)
            offset += size
        checksums.append(checksum.digest())
    _write_at(descriptor, memoryview(header.encode(checksums)), 0)


def _bytes_of(values: Any) -> memoryview:
    view = memoryview(values)
    if not view.c_contiguous:
        raise ValueError("K and V must be C-contiguous")
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # a format that memoryview can't cast, and empty shapes
        return memoryview(view.tobytes())


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_header(path: Path | str) -> EntryHeader:
    """The header of a chunk file, checked, and the file's length checked against it.

    The layers themselves are not read. Raises DamagedEntry.
    """
    descriptor, size = _open(path)
    name = os.path.basename(path)  # noqa: PTH119 (each look-up comes by here)
    try:
        data = os.pread(descriptor, _FIRST_READ, 0)
        needed = _needed(data, size, name)
        if needed > len(data):
            data += os.pread(descriptor, needed - len(data), len(data))
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return _parse(memoryview(data)[:needed], size, name)


def _open(path: Path | str) -> tuple[int, int]:
    """A descriptor of a regular file, links not followed, and its length."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DamagedEntry(f"chunk file {Path(path).name} is not a regular file")
    return descriptor, status.st_size


def _unreadable(path: Path | str, error: OSError) -> CacheblendError:
    """Damage where the file itself is at fault; else, as with too many open files, a failure that
    says nothing of the file and must not cost it."""
    if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EIO):
        return DamagedEntry(f"chunk file {Path(path).name} cannot be opened: {error.strerror}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UnreadableEntry(
            f"chunk file {path}: {error.strerror}", "check its owner and permissions"
        )
    hint = "raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""
    return CacheblendError(f"chunk file {path}: {error.strerror}", hint)


def _needed(start: bytes | memoryview, size: int, name: str) -> int:
    """Bytes of the header, from its first 32."""
    if len(start) < _START.size:
        raise DamagedEntry(f"chunk file {name} is cut short: {size} bytes")
    magic, version, header_bytes, _ = _START.unpack_from(start)
    if magic != MAGIC:
        raise DamagedEntry(f"chunk file {name} is not a chunk file")
    if version != FORMAT_VERSION:
        raise DamagedEntry(
            f"chunk file {name} has format version {version}, this is {FORMAT_VERSION}"
        )
    if header_bytes % ALIGNMENT or not _START.size + _FIELDS.size < header_bytes <= _MAX_HEADER:
        raise DamagedEntry(f"chunk file {name} has a damaged header")
    if header_bytes > size:
        raise DamagedEntry(f"chunk file {name} is cut short: {size} bytes")
    return cast(int, header_bytes)


def _parse(data: memoryview, size: int, name: str) -> EntryHeader:
    checksum = xxh3_128(data[:16])
    checksum.update(data[_START.size :])
    if checksum.digest() != data[16 : _START.size]:
        raise DamagedEntry(f"chunk file {name} has a damaged header")
    try:
        header = _fields(data)
    except (ValueError, IndexError, UnicodeDecodeError, struct.error) as error:
        raise DamagedEntry(f"chunk file {name} has an impossible header") from error
    if header.header_bytes != len(data):
        raise DamagedEntry(f"chunk file {name} has an impossible header")
    if header.file_bytes != size:
        raise DamagedEntry(f"chunk file {name} has {size} bytes instead of {header.file_bytes}")
    return header


def _fields(data: memoryview) -> EntryHeader:
    layers, kv_heads, head_dim, dtype, tokens, context, *lengths = _FIELDS.unpack_from(
        data, _START.size
    )
    sizes = (*lengths, 4 * tokens, 4 * context, layers * _CHECKSUM_BYTES)
    pieces, end = [], _START.size + _FIELDS.size
    for size in sizes:
        pieces.append(bytes(data[end : end + size]))
        end += size
    if end > len(data):
        raise ValueError("a field reaches beyond the header")
    model, tokenizer, regime, chunk_id = (piece.decode() for piece in pieces[:4])
    return EntryHeader(
        spec=_spec(model, tokenizer, layers, kv_heads, head_dim, _DTYPES[dtype]),
        token_ids=unpack_ids(pieces[4]),
        context=unpack_ids(pieces[5]),
        regime=regime,
        chunk_id=chunk_id,
        checksums=tuple(
            pieces[6][i : i + _CHECKSUM_BYTES] for i in range(0, len(pieces[6]), _CHECKSUM_BYTES)
        ),
    )


_spec = lru_cache(64)(KVSpec)  # most entries of a store have the same


def header_length(start: bytes | memoryview, size: int, name: str) -> int:
    """How long the header of a chunk file is, from its first 32 bytes; size: of the whole file.

    Raises DamagedEntry, naming the file `name`, for what isn't one.
    """
    return _needed(start, size, name)


def parse_header(data: bytes | memoryview, size: int, name: str) -> EntryHeader:
    """The header from its bytes, `header_length` of them, checked as `read_header` does."""
    return _parse(memoryview(data), size, name)


class EntryReader:
    """A chunk file mapped into memory.

    Views that `layer` gave stay good after `close`: they hold the mapping. Raises DamagedEntry
    when made for a file that is missing, cut short, foreign, a link, or has a damaged header.
    """

    tier = "disk"

    def __init__(self, path: Path, on_close: Callable[[], None] | None = None) -> None:
        self._map: mmap.mmap | None = None
        self._on_close: Callable[[], None] | None = None
        self.path = path
        descriptor, size = _open(path)
        try:
            if size < _START.size:  # an empty file can't be mapped
                raise DamagedEntry(f"chunk file {path.name} is cut short: {size} bytes")
            # Whoever evicts passes over a file that is locked. The mapping has a duplicate of the
            # descriptor, which keeps the lock until nobody uses the mapping any more. One that is
            # being removed just now can't be locked and is as good: its bytes stay until then.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            os.close(descriptor)
        view = memoryview(mapped)
        self._view = view
        self.header = _parse(view[: _needed(view, size, path.name)], size, path.name)
        self._map = mapped
        self._part_bytes = self.header.spec.part_bytes(len(self.header.token_ids))
        self._checked = [False] * self.header.spec.layers
        self._on_close = on_close

    def layer(self, index: int) -> tuple[memoryview, memoryview]:
        """K and V of a layer, read-only bytes as they are in the file, not copied.

        The layer's checksum is verified when it is first asked for. Raises DamagedEntry where it
        differs, IndexError for a layer that isn't there, ValueError after `close`.
        """
        if self._map is None:
            raise ValueError("the entry is closed")
        if not 0 <= index < len(self._checked):
            raise IndexError(f"layer {index} of {len(self._checked)}")
        k_bytes, length = self._part_bytes[0], sum(self._part_bytes)
        start = self.header.header_bytes + index * length
        data = self._view[start : start + length]
        if not self._checked[index]:
            if xxh3_128(data).digest() != self.header.checksums[index]:
                data.release()  # it would keep the file in use as long as the error is about
                raise DamagedEntry(f"chunk file {self.path.name} is damaged in layer {index}")
            self._checked[index] = True
        return data[:k_bytes], data[k_bytes:]

    @property
    def file(self) -> memoryview:
        """The whole file's bytes, good until `close`; the layers' are unchecked."""
        return self._view

    @property
    def header_checksum(self) -> bytes:
        """The header's checksum, which holds those of the layers: it stands for the whole file."""
        return bytes(self._view[16 : _START.size])

    def verify(self) -> None:
        """Checks every layer. Raises DamagedEntry for the first that isn't as it was written."""
        for index in range(self.header.spec.layers):
            self.layer(index)

    def close(self) -> None:
        """Gives the file back; views handed out stay good. Closing twice is fine."""
        mapped, self._map = self._map, None
        if mapped is not None:
            self._view.release()
            with contextlib.suppress(BufferError):  # views are in use: the last one frees it
                mapped.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
