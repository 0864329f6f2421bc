"""Where a store is, or may be made."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from diskcache.core import DBNAME

from cache_store.catalog import CATALOG_NAME, SET_ASIDE
from cache_store.database import SUFFIXES
from cache_store.disk import PARTIAL
from cache_store.errors import IntegrityError, UsageError
from cache_store.journal import JOURNAL_FOLDER

KV_FOLDER = "kv"
DEFAULT_LIMIT = 20 * 10**9
MIN_LIMIT = 4 * 2**20
"""Below this the databases alone would leave no room."""


def default_limit(path: Path) -> int:
    """The limit a new store at `path` gets: 20 GB or a tenth of the free disk, the smaller."""
    return min(DEFAULT_LIMIT, _free(path) // 10)


def _free(path: Path) -> int:
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def first_limit(path: Path) -> int:
    """`default_limit`. Raises UsageError where that is too little for a store."""
    limit = default_limit(path)
    if limit < MIN_LIMIT:
        raise UsageError(
            f"the disk of {path} has {_free(path) / 1e6:.1f} MB free: a tenth of that, which a new "
            "store takes, is too little",
            "choose another disk, or give it more with cacheblend store limit SIZE, at least "
            f"{-(-MIN_LIMIT // 10**5) / 10} MB",
        )
    return limit


def check_limit(limit: int) -> None:
    """Raises UsageError for a limit below `MIN_LIMIT`."""
    if limit < MIN_LIMIT:
        raise UsageError(
            f"a store's limit of {limit} bytes is too small", f"give at least {MIN_LIMIT} bytes"
        )


def is_new(root: Path) -> bool:
    """Whether there is no store yet. Raises UsageError where something else is in its place."""
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        if root.is_symlink():
            raise UsageError(
                f"{root} is a link to {root.readlink()}, which isn't there",
                "make that folder, or choose another place with --store",
            ) from None
        return True
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{root} is not a folder", "choose another place with --store")
    kv = root / KV_FOLDER
    for folder in (kv, kv / PARTIAL):  # through a link we'd write outside of the store
        if folder.is_symlink():
            raise IntegrityError(f"{folder} is a link", "remove it")
    if os.path.lexists(kv / DBNAME) or (kv.is_dir() and any(kv.glob("*.kv"))):
        return False
    ours = {KV_FOLDER, JOURNAL_FOLDER, SET_ASIDE, *(CATALOG_NAME + suffix for suffix in SUFFIXES)}
    if any(item.name not in ours for item in root.iterdir()):
        raise UsageError(
            f"{root} holds other files and no store",
            "choose an empty or a new folder with --store",
        )
    return True
