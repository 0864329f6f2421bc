"""A small spec, and KV made up for it."""

from __future__ import annotations

import os
import random
import subprocess
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_store.catalog_database import CatalogDatabase
from cache_store.entry import EntryHeader, EntryReader
from cache_store.index_database import IndexDatabase
from cache_store.keys import KVSpec
from cache_store.store import ChunkStore

SPEC = KVSpec("model" * 8, "tokenizer" * 4, layers=3, kv_heads=2, head_dim=4, dtype="fp32")
BIG = replace(SPEC, layers=4, kv_heads=8, head_dim=128)  # 32 kB a token
CONTEXT = (1, 2, 3)

Layers = list[tuple[bytes, bytes]]


_STRESS = float(os.environ.get("CACHEBLEND_STRESS", "1"))


def scaled(number: int) -> int:
    """How often to do something: the small number, times CACHEBLEND_STRESS for the full figures."""
    return max(1, round(number * _STRESS))


def make_layers(spec: KVSpec, tokens: int, seed: int = 0) -> Layers:
    """Random K and V, the same for the same arguments."""
    source = random.Random(f"{seed} {tokens}")
    half = spec.layer_bytes(tokens) // 2
    return [(source.randbytes(half), source.randbytes(half)) for _ in range(spec.layers)]


def put(
    store: ChunkStore,
    ids: Sequence[int],
    context: Sequence[int] = CONTEXT,
    *,
    spec: KVSpec = SPEC,
    regime: str = "",
    seed: int = 0,
    chunk_id: str = "",
    saved: bool = False,
) -> str:
    layers = make_layers(spec, len(ids), seed)
    return store.put(spec, ids, context, regime, layers, chunk_id=chunk_id, saved=saved)


def read(store: ChunkStore, key: str) -> tuple[EntryHeader, Layers]:
    """An entry's header and a copy of its layers."""
    with store.open_entry(key) as reader:
        return reader.header, copy(reader)


def copy(reader: EntryReader) -> Layers:
    layers = [reader.layer(index) for index in range(reader.header.spec.layers)]
    return [(bytes(k), bytes(v)) for k, v in layers]


def files(store: ChunkStore) -> list[Path]:
    """The chunk files in a store's folder, indexed or not."""
    return sorted((store.path / "kv").glob("*.kv"))


def file_of(store: ChunkStore, key: str) -> Path:
    return next(path for path in files(store) if path.name.startswith(key))


def change(path: Path, how: Callable[[bytearray], object]) -> None:
    """Changes a file's bytes in place."""
    data = bytearray(path.read_bytes())
    how(data)
    path.write_bytes(data)


def flip(path: Path, position: int) -> None:
    """Flips one bit of a file."""

    def one_bit(data: bytearray) -> None:
        data[position] ^= 1

    change(path, one_bit)


def du(path: Path) -> int:
    """What the system's own `du` counts, in bytes."""
    out = subprocess.run(
        ["du", "-s", "-k", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return int(out.split()[0]) * 1024


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Makes transactions wait for a moment only, where others would have to wait, too."""
    for owner, name in ((IndexDatabase, "transaction"), (CatalogDatabase, "writing")):
        real = getattr(owner, name)

        def quick(*args: Any, real: Any = real, **named: Any) -> Any:
            return real(*args, **{**named, "patience": 0.01})

        patch.setattr(owner, name, quick)


def in_child(work: Callable[[], object]) -> int:
    """Starts `work` in a process of its own and returns the process's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Waits for a child; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
