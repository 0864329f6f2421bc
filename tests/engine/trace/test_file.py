"""Trace files: what was written is read, and nothing else ever is."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from engine.trace import file as file_module
from engine.trace.file import MAGIC, from_bytes, read, to_bytes, write
from engine.trace.record import Stage, Trace
from tests.engine.trace.made import IDS, PIECES, make, result


def plain(value: Any) -> Any:
    """Something that == compares, arrays with their types."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def test_what_was_written_is_read(tmp_path: Path) -> None:
    trace = make()
    path = tmp_path / "a.cbtrace"
    write(trace, path)
    found = read(path)
    assert plain(found) == plain(trace)
    assert [found.tokens.text[slice(*found.tokens.span(i))] for i in range(len(IDS))] == [*PIECES]
    assert found.selected.tolist() == [2, 4]
    assert found.stages[0].selected().tolist() == [2, 4]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["a.cbtrace"]


def test_the_barest_trace(tmp_path: Path) -> None:
    bare = make(
        level="basic",
        stages=(),
        spans=(),
        phases=(),
        answer=(),
        reference=(),
        attention_layers=(),
        attention_positions=None,
        attention=None,
        deviations=None,
        bound=None,
    )
    assert plain(from_bytes(to_bytes(bare), "it")) == plain(bare)
    none = np.zeros(0, np.int32)
    empty = replace(bare, stages=(Stage(0, none, np.zeros(0, np.float32), 0),))
    assert plain(from_bytes(to_bytes(empty), "it")) == plain(empty)


def test_it_is_compact() -> None:
    n = 4096
    ids = np.arange(n, dtype=np.int32) % 49152
    shown = result()
    shown["prompt"] = {
        "token_ids": ids.tolist(),
        "segments": [{**result()["prompt"]["segments"][1], "start": 0, "end": n}],
    }
    tokens = replace(
        make().tokens,
        ids=ids,
        text=b"word" * n,
        ends=np.arange(4, 4 * n + 1, 4, dtype=np.int32),
        computed=np.zeros(n, np.int16),
    )
    positions = np.arange(n, dtype=np.int32)
    stage = Stage(1, positions, positions.astype(np.float32), 600)
    big = make(tokens=tokens, stages=(stage,), result=shown)
    big = replace(big, attention_layers=(), attention=None, attention_positions=None)
    assert len(to_bytes(big)) < 14 * n


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = to_bytes(make())
    for at in range(len(data)):
        harmed = bytearray(data)
        harmed[at] ^= 1 << (at % 8)
        with pytest.raises(IntegrityError):
            from_bytes(bytes(harmed), "it")
    for end in range(0, len(data), 7):
        with pytest.raises(IntegrityError, match=r"it (is|was)"):
            from_bytes(data[:end], "it")
    with pytest.raises(IntegrityError, match="damaged"):
        from_bytes(data + b"\0", "it")


def test_errors_name_the_file_and_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.cbtrace"
    with pytest.raises(NotFoundError, match=r"x\.cbtrace"):
        read(path)
    with pytest.raises(UsageError, match="no file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file"):
        read(tmp_path / "pipe")
    for content in (b"", b"PK\x03\x04" + b"\0" * 100, b'{"schema": 1}', b"\0" * 48):
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match=r"x\.cbtrace is no trace"):
            read(path)
    path.write_bytes(MAGIC[:5])
    with pytest.raises(IntegrityError, match="cut short"):
        read(path)
    data = bytearray(to_bytes(make()))
    data[8:12] = struct.pack("<I", 2)
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"newer cacheblend \(version 2") as raised:
        read(path)
    assert raised.value.hint == "update cacheblend"
    assert "\n" not in raised.value.message


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.cbtrace"
    with path.open("wb") as file:
        file.truncate(file_module.MAX_BYTES + 1)  # a hole
    with pytest.raises(IntegrityError, match="too large"):
        read(path)


def forged(change: Any, body: bytes | None = None) -> bytes:
    """A file with a good checksum whose header went through `change`."""
    data = to_bytes(make())
    (size,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[48 : 48 + size])
    header = change(header) or header
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    rest = raw + (data[48 + size :] if body is None else body)
    head = MAGIC + struct.pack("<II", 1, len(raw))
    return head + blake3(head + rest).digest() + rest


def setting(*path: Any, to: Any) -> Any:
    def change(header: Any) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = to

    return change


def deleting(*path: Any) -> Any:
    def change(header: Any) -> None:
        for key in path[:-1]:
            header = header[key]
        del header[path[-1]]

    return change


SEGMENTS = ("result", "prompt", "segments")
FORGERIES = {
    "unchanged": None,
    "no json": lambda header: b"{",
    "no utf-8": lambda header: b'"\xff"',
    "a list": lambda header: [1],
    "deep": lambda header: b"[" * 100_000 + b"]" * 100_000,
    "nan": lambda header: json.dumps(header).replace("0.375", "NaN").encode(),
    "infinite": lambda header: json.dumps(header).replace("0.375", "1e999").encode(),
    "a lone surrogate": setting("question", to="\ud800"),
    "an id that is a path": setting("id", to="../x"),
    "a level": setting("level", to="all"),
    "no layers": setting("layers", to=0),
    "more layers": setting("layers", to=4),
    "true layers": setting("layers", to=True),
    "a time": setting("created", to=1e300),
    "a stage's layer": setting("stages", 0, 0, to=3),
    "a stage's count": setting("stages", 0, 1, to=6),
    "a stage too many": setting("stages", to=[[1, 2], [2, 1]]),
    "a span too few": lambda header: header["spans"].pop() and None,
    "a span's time": setting("spans", 0, 0, to=-1),
    "a span's text": setting("spans", 0, 1, to="x"),
    "a long span": setting("spans", 0, to=[0.0] * 9),
    "a phase": setting("phases", 0, 0, to="sleep"),
    "a phase backwards": setting("phases", 0, 2, to=-9.0),
    "an answer's kl": setting("answer", 0, 2, to=-0.5),
    "an answer's text": setting("answer", 0, 1, to=5),
    "attention's layers": setting("attention_layers", to=[2, 1]),
    "attention's layer": setting("attention_layers", to=[1, 3]),
    "no attention": setting("attention_layers", to=None),
    "deviations' layers": setting("deviation_layers", to=[1]),
    "deviations of a basic trace": setting("level", to="basic"),
    "a negative bound": setting("bound", to=-1),
    "no answer": deleting("result", "answer"),
    "no times": deleting("result", "timing", "ttft_s"),
    "no segments": setting(*SEGMENTS, to=[]),
    "a segment's end": setting(*SEGMENTS, 2, "end", to=9),
    "a gap": setting(*SEGMENTS, 1, "start", to=2),
    "a segment's kind": setting(*SEGMENTS, 1, "kind", to="thing"),
    "a huge number": setting(*SEGMENTS, 2, "end", to=10**400),
    "a comparison": setting("result", "compare", to={}),
    "a huge shape": setting("arrays", 0, 2, to=[2**40]),
    "a shape that wraps": setting("arrays", 0, 2, to=[2**30, 2**34]),
    "a negative shape": setting("arrays", 0, 2, to=[-1]),
    "a shape too deep": setting("arrays", 0, 2, to=[8, 1, 1]),
    "an object array": setting("arrays", 0, 1, to="|O"),
    "a type": setting("arrays", 0, 1, to="<f4"),
    "a name": setting("arrays", 0, 0, to="other"),
    "an array too few": lambda header: header["arrays"].pop() and None,
    "an array twice": lambda header: header["arrays"].append(header["arrays"][0]),
    "no array list": setting("arrays", to=5),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_good_checksum_over_something_unsound(name: str) -> None:
    change = FORGERIES[name]
    if change is None:
        from_bytes(forged(lambda header: None), "it")
        return
    with pytest.raises(IntegrityError, match="it is no sound trace") as raised:
        from_bytes(forged(change), "it")
    assert len(raised.value.message) < 300
    assert "\n" not in raised.value.message


@given(st.data())
def test_forged_arrays_never_crash(data: Any) -> None:
    made = to_bytes(make())
    (size,) = struct.unpack_from("<I", made, 12)
    body = bytearray(made[48 + size :])
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        body[at] = data.draw(st.integers(0, 255))
    try:
        found = from_bytes(forged(lambda header: None, bytes(body)), "it")
    except IntegrityError:
        return
    assert found.tokens.ends[-1] == len(found.tokens.text)
    assert found.tokens.computed.max() <= found.layers
    assert np.isfinite(found.stages[0].scores).all()
    for stage in found.stages:
        assert stage.positions.max(initial=0) < len(found.tokens.ids)


def unsound() -> list[Trace]:
    trace = make()
    stage, tokens = trace.stages[0], trace.tokens
    return [
        replace(trace, stages=(replace(stage, scores=stage.scores * np.float32(np.nan)),)),
        replace(trace, stages=(replace(stage, positions=stage.positions[::-1].copy()),)),
        replace(trace, tokens=replace(tokens, ends=tokens.ends[::-1].copy())),
        replace(trace, tokens=replace(tokens, ids=tokens.ids.astype(np.int64))),
        replace(trace, result={**trace.result, "prompt": {"segments": []}}),
        replace(trace, result={**trace.result, "extra": float("inf")}),
        replace(trace, bound=float("inf")),
    ]


@pytest.mark.parametrize("trace", unsound())
def test_an_unsound_trace_is_not_written(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(CacheblendError, match="cannot be written"):
        write(trace, tmp_path / "x.cbtrace")
    assert list(tmp_path.iterdir()) == []


def test_only_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no file"):
        write(make(), tmp_path / "pipe")
    target, link = tmp_path / "x.cbtrace", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write(make(), link)
    assert link.is_symlink()
    assert read(link).id == make().id


def test_a_name_that_is_no_utf8_is_kept_readable() -> None:
    trace = make(question="a\udcff")
    assert from_bytes(to_bytes(trace), "it").question == "a?"


def test_reading_needs_no_tensor_library(tmp_path: Path) -> None:
    write(make(), tmp_path / "x.cbtrace")
    code = (
        "import sys; from engine.trace import heat, overlap, read; read(sys.argv[1]); "
        "print(*({'torch', 'transformers', 'tokenizers'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.cbtrace")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""
