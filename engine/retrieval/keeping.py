"""Where what is made of a store's chunks is kept: outside of the store, which it never fills."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from blake3 import blake3

STORE_NAME = "store"
"""The file in a folder that names the store it is for."""


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
