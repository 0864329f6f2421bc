"""What is made of a store's chunks, kept outside of the store, which it never fills."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

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
"""Arrays by name."""


def kept_arrays(
    corpus: Corpus[ChunkT],
    name: str,
    version: str,
    made: Callable[[list[str], list[str], Held], Held],
) -> tuple[list[str], Held]:
    """The ids of a corpus and arrays made of its texts: those in the file `name` of its folder
    where nothing has changed since, else new ones, which are then kept there.

    version: of how they are made; those of another are not used. made: makes them for these ids,
    and is given the ids and the arrays that were kept, if any.
    """
    path = None if corpus.folder is None else corpus.folder / name
    ids = corpus.ids()
    known: list[str] = []
    held: Held = {}
    found = None if path is None else read_arrays(path)
    if found is not None and found.facts.get("version") == version and _IDS in found.arrays:
        known = ids_list(found.arrays[_IDS])
        held = {key: value for key, value in found.arrays.items() if key != _IDS}
        if ids == known:
            return ids, held
    held = made(ids, known, held)
    # Where somebody has changed the chunks meanwhile, nobody knows which of them were read.
    if path is not None and len(ids) >= KEPT_FROM and corpus.ids() == ids:
        with contextlib.suppress(OSError):  # where they can't be kept, they are made again
            write_arrays(path, Arrays({"version": version}, {_IDS: ids_array(ids), **held}))
    return ids, held


def kept_folder(root: Path, store: Path) -> Path:
    """The folder under `root` for a store: indexes and vectors, which may be removed at any time.

    Where it is new, those of stores that are no more are removed. One that can't be made is no
    error: then nothing is kept.
    """
    name = os.fsencode(store.absolute())
    folder = root / blake3(name).hexdigest()[:24]
    with contextlib.suppress(OSError):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / STORE_NAME).write_bytes(name)
            _sweep(root)
    return folder


def _sweep(root: Path) -> None:
    for marker in root.glob(f"*/{STORE_NAME}"):
        with contextlib.suppress(OSError):
            if not Path(os.fsdecode(marker.read_bytes())).exists():
                shutil.rmtree(marker.parent)
