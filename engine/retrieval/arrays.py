"""Files of arrays, kept for the next process: written whole, checked before they are used."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

_MAGIC = b"cbarrays1\n"
_ALIGNED = 64  # bytes that an array begins at a multiple of
_DTYPES = ("uint8", "int32", "int64", "float32")
_MAX_HEADER = 2**16
_ABANDONED = 3600  # seconds after which nobody is still writing

Array = np.ndarray[Any, np.dtype[Any]]


class Arrays(NamedTuple):
    """What a file holds: facts about the arrays, as JSON has them, and the arrays by name."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, Array]


def write_arrays(path: Path, held: Arrays) -> None:
    """Writes a file in one step, readable by its owner alone. Raises OSError."""
    layout: dict[str, Any] = {}
    offset = 0
    checksum = xxhash.xxh3_128()
    for name, array in held.arrays.items():
        layout[name] = [str(array.dtype), list(array.shape), offset]
        checksum.update(np.ascontiguousarray(array).data)
        offset += _aligned(array.nbytes)
    header = json.dumps(
        {"facts": dict(held.facts), "arrays": layout, "checksum": checksum.hexdigest()}
    ).encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + len(header).to_bytes(4, "little") + header)
            start = _aligned(file.tell())
            for name, array in held.arrays.items():
                file.seek(start + layout[name][2])
                file.write(np.ascontiguousarray(array).data)
            file.truncate(start + offset)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _sweep(path: Path) -> None:
    """Removes what processes that were killed have left of writing the file."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()


def read_arrays(path: Path) -> Arrays | None:
    """What a file holds, its arrays mapped into memory and read-only; None where there is none, it
    can't be read, or it isn't as it was written."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            length = int.from_bytes(file.read(4), "little")
            if length > _MAX_HEADER:
                return None
            header = json.loads(file.read(length))
            start = _aligned(file.tell())
        data = np.memmap(path, np.uint8, "r")
        checksum = xxhash.xxh3_128()
        arrays: dict[str, Array] = {}
        for name, (dtype, shape, offset) in header["arrays"].items():
            if dtype not in _DTYPES:
                return None
            size = math.prod(shape) * np.dtype(dtype).itemsize
            raw = data[start + offset : start + offset + size]
            arrays[name] = raw.view(dtype).reshape(shape)
            checksum.update(raw.data)
        if checksum.hexdigest() != header["checksum"]:
            return None
        return Arrays(header["facts"], arrays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def ids_array(ids: list[str]) -> Array:
    """Ids of chunks, 64 hex digits each, as bytes [n, 32]. Raises ValueError for others."""
    raw = np.frombuffer(bytes.fromhex("".join(ids)), np.uint8)
    return raw.reshape(len(ids), 32)


def ids_list(array: Array) -> list[str]:
    """The ids that `ids_array` has made an array of."""
    text = array.tobytes().hex()
    return [text[at : at + 64] for at in range(0, len(text), 64)]
