"""What is made of a store's chunks, kept outside of the store, which it never fills."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from engine.retrieval.arrays import Array, Arrays, ids_array, ids_list, read_arrays, write_arrays
from engine.retrieval.corpus import Corpus
from engine.retrieval.hit import ChunkT

KEPT_FROM = 256
"""So many chunks at least: what is made of fewer is made in less time than it is read."""

STORE_NAME = "store"
"""The file in a folder that names the store it is for."""

_IDS = "ids"

Held = Mapping[str, Array]
"""Arrays by name, with something in them for every chunk."""


@dataclass(frozen=True)
class Change:
    """From the chunks that arrays were made of to those that they are wanted for.

    count: of those wanted. places: int64, for each chunk that there was its row among them, or -1.
    rows: of those that are new. texts: theirs, read as they are asked for.
    """

    count: int
    places: Array
    rows: list[int]
    texts: Iterator[str]


def kept_arrays(
    corpus: Corpus[ChunkT],
    name: str,
    version: str,
    merged: Callable[[Held | None, Change], Held],
) -> tuple[list[str], Held]:
    """The ids of a corpus and arrays made of its texts, in the file `name` of its folder as far as
    they are there.

    version: of how they are made; those of another are not used. merged: makes them, from what
    was held and what has changed since.
    """
    path = None if corpus.folder is None else corpus.folder / name
    state = corpus.state
    known: list[str] = []
    held: Held | None = None
    found = None if path is None else read_arrays(path)
    if found is not None and found.facts.get("version") == version and _IDS in found.arrays:
        known = ids_list(found.arrays[_IDS])
        held = {key: value for key, value in found.arrays.items() if key != _IDS}
        if found.facts.get("state") == state:
            return known, held
    ids = corpus.ids()
    if held is None or ids != known:
        held = merged(held, _change(corpus, known, ids))
    if path is not None and len(ids) >= KEPT_FROM:
        facts = {"version": version, "state": state}
        with contextlib.suppress(OSError):  # where they can't be kept, they are made again
            write_arrays(path, Arrays(facts, {_IDS: ids_array(ids), **held}))
    return ids, held


def _change(corpus: Corpus[ChunkT], known: list[str], ids: list[str]) -> Change:
    row_of = {one: row for row, one in enumerate(ids)}
    places = np.fromiter((row_of.get(one, -1) for one in known), np.int64, len(known))
    there = set(known)
    new = [one for one in ids if one not in there]
    return Change(len(ids), places, [row_of[one] for one in new], corpus.texts(new))


def kept_folder(root: Path, store: Path) -> Path:
    """The folder under `root` for a store: indexes and vectors, which may be removed at any time.

    Where it is new, those of stores that are no more are removed. One that can't be made is no
    error: then nothing is kept.
    """
    name = os.fsencode(store.absolute())
    folder = root / blake3(name).hexdigest()[:24]
    if folder.is_dir():
        return folder
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / STORE_NAME).write_bytes(name)
        _sweep(root)
    return folder


def _sweep(root: Path) -> None:
    for marker in root.glob(f"*/{STORE_NAME}"):
        with contextlib.suppress(OSError):
            if not Path(os.fsdecode(marker.read_bytes())).exists():
                shutil.rmtree(marker.parent)
