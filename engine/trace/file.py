"""Traces as files: plain numbers behind a JSON header, with a checksum over all of it.

    0   8  b"CBTRACE\\n"
    8   4  version
    12  4  bytes of the header
    16 32  BLAKE3 of everything before and after it
    48     header, JSON in UTF-8; then its arrays, one after the other

Whole numbers are little-endian, and as wide as their largest value needs; see docs/trace.md.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from engine.trace.check import MOST_LAYERS, check
from engine.trace.record import (
    VERSION,
    AnswerToken,
    Deviations,
    LayerSpan,
    Phase,
    Stage,
    TokenTable,
    Trace,
)

SUFFIX = ".cbtrace"
MAGIC = b"CBTRACE\n"
MAX_BYTES, MOST_TOKENS = 2**30, 2**24
"""Of a file that is read."""

_Array = npt.NDArray[Any]
_HEAD = struct.Struct("<8sII32s")
_DIGEST = 32
_WHOLE = ("<u1", "<u2", "<u4")
_ADVICE = "record the run again: cacheblend ask --trace FILE"


def write(trace: Trace, path: Path) -> None:
    """Writes a trace, whole or not at all, for its owner alone to read.

    Raises UsageError where something other than a file is at `path`, CacheblendError for a trace
    that `read` would refuse, OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"{path} is no file", "name a file for the trace")
    data = to_bytes(trace)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=f"{SUFFIX}.part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> Trace:
    """The trace in a file; what it holds is sound, see `check`.

    Raises NotFoundError, UsageError for what is no file, IntegrityError for one that is damaged,
    foreign or of a newer version, OSError.
    """
    path = Path(path)
    try:
        mode, size = path.stat().st_mode, path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no trace {path}", _ADVICE) from None
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is no file", "name a trace")
    if size > MAX_BYTES:
        raise IntegrityError(f"{path} is too large for a trace", _ADVICE)
    return from_bytes(path.read_bytes(), str(path))


def is_of_mode(path: Path, mode: str) -> bool:
    """Whether a file has the header of a trace of a run in a mode: to look through many without
    reading all of them. False for what cannot be read; what is found may still be damaged."""
    try:
        with path.open("rb") as file:
            magic, version, size, _ = _HEAD.unpack(file.read(_HEAD.size))
            if magic != MAGIC or version > VERSION:
                return False
            # Quotes within texts have a backslash before them.
            return f'"mode":"{mode}"'.encode() in file.read(min(size, MAX_BYTES))
    except (OSError, struct.error):
        return False


def to_bytes(trace: Trace) -> bytes:
    """What `write` writes. Raises CacheblendError for a trace that `read` would refuse."""
    try:
        check(trace)
        arrays = _arrays(trace)
        header = _header(trace) | {
            "arrays": [[name, values.dtype.str, list(values.shape)] for name, values in arrays]
        }
        # Lone surrogates, of file names that are no UTF-8, become question marks.
        text = json.dumps(header, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise CacheblendError(f"the trace cannot be written: {error}") from error
    raw = text.encode("utf-8", "replace")
    body = b"".join([raw, *(values.tobytes() for _, values in arrays)])
    head = _HEAD.pack(MAGIC, VERSION, len(raw), b"\0" * _DIGEST)[:-_DIGEST]
    return head + blake3(head + body).digest() + body


def from_bytes(data: bytes, name: str) -> Trace:
    """A trace from what `write` wrote. Raises IntegrityError, calling it by `name`."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        what = "is cut short" if data and MAGIC.startswith(data[: len(MAGIC)]) else "is no trace"
        raise IntegrityError(f"{name} {what}", _ADVICE)
    _, version, size, digest = _HEAD.unpack_from(data)
    if version > VERSION:
        raise IntegrityError(
            f"{name} was written by a newer cacheblend (version {version} of the format, "
            f"this one reads {VERSION})",
            "update cacheblend",
        )
    body = memoryview(data)[_HEAD.size :]
    if blake3(data[: _HEAD.size - _DIGEST]).update(body).digest() != digest:
        raise IntegrityError(f"{name} is damaged: its checksum is another", _ADVICE)
    try:
        header = json.loads(bytes(body[:size]).decode("utf-8"), parse_constant=_constant)
        json.dumps(header, ensure_ascii=False).encode("utf-8")  # no lone surrogates
        trace = _trace(header, _read_arrays(header["arrays"], body[size:]))
        check(trace)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        # A good checksum over something else: another program's, or made to deceive.
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise IntegrityError(f"{name} is no sound trace: {said}", _ADVICE) from error
    return trace


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _header(trace: Trace) -> dict[str, Any]:
    """All but the arrays. The prompt's token ids are one of these."""
    prompt = {key: value for key, value in trace.result["prompt"].items() if key != "token_ids"}
    return {
        "id": trace.id,
        "created": trace.created,
        "level": trace.level,
        "question": trace.question,
        "layers": trace.layers,
        "result": {**trace.result, "prompt": prompt},
        "stages": [[stage.layer, stage.chosen] for stage in trace.stages],
        "spans": [astuple(span) for span in trace.spans],
        "phases": [astuple(phase) for phase in trace.phases],
        "answer": [astuple(token) for token in trace.answer],
        "reference": [astuple(token) for token in trace.reference],
        "attention_layers": None if trace.attention is None else trace.attention_layers,
        "deviation_layers": None if trace.deviations is None else trace.deviations.layers,
        "bound": trace.bound,
        "reuse_ttft_s": trace.reuse_ttft_s,
    }


def _arrays(trace: Trace) -> list[tuple[str, _Array]]:
    """Their names and values. Of what rises, the steps."""
    tokens = trace.tokens
    found: list[tuple[str, _Array]] = [
        ("ids", _narrow(tokens.ids)),
        ("text", np.frombuffer(tokens.text, np.uint8)),
        ("lengths", _steps(tokens.ends)),
        ("computed", _narrow(tokens.computed)),
    ]
    for index, stage in enumerate(trace.stages):
        found.append((f"positions {index}", _steps(stage.positions)))
        found.append((f"scores {index}", stage.scores.astype("<f4")))
    if trace.attention is not None and trace.attention_positions is not None:
        found.append(("attention positions", _steps(trace.attention_positions)))
        found.append(("attention", np.minimum(trace.attention, 65504).astype("<f2")))
    if trace.deviations is not None:
        found.append(("deviation positions", _steps(trace.deviations.positions)))
        found.append(("deviation k", trace.deviations.k.astype("<f4")))
        found.append(("deviation v", trace.deviations.v.astype("<f4")))
    return found


def _steps(rising: _Array) -> _Array:
    return _narrow(np.diff(rising, prepend=rising.dtype.type(0)))


def _narrow(values: _Array) -> _Array:
    """Whole numbers from 0 on, as wide as the largest needs."""
    most = int(values.max()) if len(values) else 0
    kind = next(kind for kind in _WHOLE if most <= np.iinfo(kind).max)
    return values.astype(kind)


def _read_arrays(listed: Any, body: memoryview) -> dict[str, _Array]:
    """The arrays that the header lists, which must fill the rest of the file."""
    found: dict[str, _Array] = {}
    at = 0
    for name, kind, shape in listed:
        if name in found or kind not in (*_WHOLE, "|u1", "<f2", "<f4"):
            raise ValueError("an array of another kind")
        if not all(type(side) is int and 0 <= side <= MAX_BYTES for side in shape):
            raise ValueError("an array of no shape")
        if len(shape) not in (1, 2) or (name != "text" and shape[-1] > MOST_TOKENS):
            raise ValueError("an array of no shape")
        dtype = np.dtype(kind)
        size = math.prod(shape) * dtype.itemsize
        if size > len(body) - at:
            raise ValueError("arrays larger than the file")
        found[name] = np.frombuffer(body[at : at + size], dtype).reshape(shape)
        at += size
    if at != len(body):
        raise ValueError("more than its arrays")
    return found


def _trace(header: Mapping[str, Any], arrays: dict[str, _Array]) -> Trace:
    ids = _whole(arrays.pop("ids"), np.int32)
    tokens = TokenTable(
        ids,
        _bytes(arrays.pop("text")),
        _summed(arrays.pop("lengths")),
        _whole(arrays.pop("computed"), np.int16, MOST_LAYERS),
    )
    stages = tuple(
        Stage(
            layer,
            _summed(arrays.pop(f"positions {index}")),
            _floats(arrays.pop(f"scores {index}"), "<f4"),
            chosen,
        )
        for index, (layer, chosen) in enumerate(header["stages"])
    )
    attention = attention_positions = deviations = None
    if header["attention_layers"] is not None:
        attention_positions = _summed(arrays.pop("attention positions"))
        attention = _floats(arrays.pop("attention"), "<f2")
    if header["deviation_layers"] is not None:
        deviations = Deviations(
            _layers(header["deviation_layers"]),
            _summed(arrays.pop("deviation positions")),
            _floats(arrays.pop("deviation k"), "<f4"),
            _floats(arrays.pop("deviation v"), "<f4"),
        )
    if arrays:
        raise ValueError("an array that has no place in it")
    result = dict(header["result"])
    result["prompt"] = {"token_ids": ids.tolist(), **result["prompt"]}
    return Trace(
        id=header["id"],
        created=header["created"],
        level=header["level"],
        question=header["question"],
        result=result,
        layers=header["layers"],
        tokens=tokens,
        stages=stages,
        spans=tuple(LayerSpan(*span) for span in header["spans"]),
        phases=tuple(Phase(*phase) for phase in header["phases"]),
        answer=tuple(AnswerToken(*token) for token in header["answer"]),
        reference=tuple(AnswerToken(*token) for token in header["reference"]),
        attention_layers=_layers(header["attention_layers"] or []),
        attention_positions=attention_positions,
        attention=attention,
        deviations=deviations,
        bound=header["bound"],
        reuse_ttft_s=header["reuse_ttft_s"],
    )


def _layers(listed: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(listed, list):
        raise ValueError("layers that are no list")
    return tuple(listed)


def _bytes(values: _Array) -> bytes:
    if values.dtype != np.uint8 or values.ndim != 1:
        raise ValueError("text of another kind")
    return values.tobytes()


def _whole(values: _Array, dtype: Any, most: int = 2**31 - 1) -> _Array:
    """Whole numbers [n] in the type a trace has them in."""
    if values.dtype.kind != "u" or values.ndim != 1:
        raise ValueError("whole numbers of another kind")
    if len(values) and int(values.max()) > most:
        raise ValueError("a whole number that is too large")
    return values.astype(dtype)


def _summed(steps: _Array) -> _Array:
    if steps.dtype.kind != "u" or steps.ndim != 1:
        raise ValueError("whole numbers of another kind")
    return _whole(np.cumsum(steps, dtype=np.uint64), np.int32)


def _floats(values: _Array, kind: str) -> _Array:
    if values.dtype != np.dtype(kind):
        raise ValueError("numbers of another kind")
    return values.astype(np.float32)
