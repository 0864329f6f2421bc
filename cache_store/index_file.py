"""The index's database file: its tables and settings are diskcache's, and are checked before
diskcache obeys them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from diskcache import Cache
from diskcache.core import DEFAULT_SETTINGS, METADATA

from cache_store.database import (
    BUSY_SECONDS,
    CHECKPOINT_PAGES,
    WAL_ALLOWANCE,
    check_files,
    connect_read_only,
    damaged,
)
from cache_store.disk import ChunkDisk

_SETTINGS: dict[str, int | str] = {
    "statistics": 0,
    "tag_index": 1,
    "eviction_policy": "least-recently-used",
    "cull_limit": 0,  # we evict, whole entries and never a protected one; diskcache doesn't
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 2**10,
    "sqlite_journal_mode": "wal",
    "sqlite_mmap_size": 0,  # a file cut short by someone else is an error then, not a crash
    "sqlite_synchronous": 1,
    "sqlite_wal_autocheckpoint": CHECKPOINT_PAGES,
    "sqlite_journal_size_limit": WAL_ALLOWANCE,
    "disk_min_file_size": 0,
    "disk_pickle_protocol": 0,
}
_KNOWN_SETTINGS = {*_SETTINGS, *DEFAULT_SETTINGS, *METADATA}
_KNOWN_OBJECTS = {
    "Settings": "table",
    "sqlite_autoindex_Settings_1": "index",
    "Cache": "table",
    "Cache_key_raw": "index",
    "Cache_expire_time": "index",
    "Cache_access_time": "index",
    "Cache_tag_rowid": "index",
    "Settings_count_insert": "trigger",
    "Settings_count_delete": "trigger",
    "Settings_size_insert": "trigger",
    "Settings_size_update": "trigger",
    "Settings_size_delete": "trigger",
}


def require_unlocked(path: Path, seconds: float) -> None:
    """Raises sqlite3.Error where another process still writes after that many seconds."""
    connection = sqlite3.connect(path, timeout=seconds, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def new_cache(directory: Path, limit: int, patience: float = BUSY_SECONDS) -> Cache:
    """diskcache's `Cache` as we use it; makes its tables where there are none."""
    settings = {**_SETTINGS, "size_limit": limit}
    return Cache(str(directory), timeout=patience, disk=ChunkDisk, **settings)


def look_at(path: Path, patience: float = BUSY_SECONDS) -> int | None:
    """Checks an index's tables and settings before diskcache obeys them. Returns the size limit;
    None where it was never written.

    Raises DamagedDatabase for what we would never write, sqlite3.Error.
    """
    check_files(path)
    connection = connect_read_only(path, patience)
    try:
        objects = connection.execute("SELECT name, type, sql FROM sqlite_master").fetchall()
        names = {name for name, _, _ in objects}
        settings = (
            dict(connection.execute("SELECT key, value FROM Settings").fetchall())
            if "Settings" in names
            else {}
        )
    finally:
        connection.close()
    strange = {
        str(name)
        for name, kind, sql in objects
        if _KNOWN_OBJECTS.get(name) != kind or "VIRTUAL" in str(sql)
    }
    strange |= {
        str(key)
        for key, value in settings.items()
        if key not in _KNOWN_SETTINGS
        or type(value) is not type(_SETTINGS.get(key, DEFAULT_SETTINGS.get(key, 0)))
    }
    if strange:
        raise damaged(path, f"it is not an index of ours, it holds {min(strange)!r}")
    limit = settings.get("size_limit")
    return limit if "Cache" in names else None
