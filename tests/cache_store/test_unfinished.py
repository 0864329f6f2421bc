"""Stores whose maker was killed before they were made."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache_store.database import check_files, connect_read_only
from cache_store.errors import DamagedDatabase, NotFoundError
from cache_store.index_file import new_cache
from cache_store.store import ChunkStore
from tests.cache_store.support import put

LIMIT = 2**25


def a_journal(path: Path, *, of_several: bool = False) -> None:
    """What is left of a database killed while its first page was written."""
    beside = path.with_name("beside.db")
    connection = sqlite3.connect(beside, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN")
    connection.execute("CREATE TABLE Settings (key, value)")
    for _ in range(20):
        connection.execute("INSERT INTO Settings VALUES (1, zeroblob(4000))")
    shutil.copy(beside, path)
    shutil.copy(f"{beside}-journal", f"{path}-journal")
    connection.close()
    beside.unlink()
    if of_several:
        with Path(f"{path}-journal").open("ab") as file:
            file.write(bytes.fromhex("d9d505f920a163d7"))


def no_tables(path: Path) -> None:
    sqlite3.connect(path).execute("PRAGMA journal_mode = wal").connection.close()


def settings_only(path: Path) -> None:
    with new_cache(path.parent, LIMIT) as cache:
        cache._sql("DROP TABLE Cache")


def nothing(path: Path) -> None:
    path.touch()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    kv = tmp_path / "store" / "kv"
    (kv / "partial").mkdir(parents=True)
    return kv / "cache.db"


@pytest.mark.parametrize("left", [a_journal, no_tables, settings_only, nothing])
def test_what_was_never_finished_is_no_store_until_the_next_writer(
    index: Path, left: Callable[[Path], None]
) -> None:
    left(index)
    root = index.parent.parent
    with pytest.raises(NotFoundError, match="no store"):
        ChunkStore.open(root, read_only=True)
    with pytest.raises(NotFoundError, match="no store"):
        ChunkStore.open(root, read_only=True, on_damage="go_on")
    with ChunkStore.open(root, limit_bytes=LIMIT) as store:
        assert not store.mended
        put(store, (1, 2))
        assert store.limit == LIMIT
        assert store.verify().problems == ()


def test_a_journal_that_names_a_file_elsewhere_is_never_played_back(index: Path) -> None:
    a_journal(index, of_several=True)
    with pytest.raises(DamagedDatabase, match="journal"):
        connect_read_only(index)
    with ChunkStore.open(index.parent.parent, limit_bytes=LIMIT, on_damage="mend") as store:
        assert store.mended
        put(store, (1, 2))


def test_a_journal_that_goes_while_it_is_looked_at_is_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when another process has just made the database."""
    a_journal(index)
    real, journal = Path.open, index.with_name("cache.db-journal")

    def gone(path: Path, *args: Any, **named: Any) -> Any:
        if path == journal:
            journal.unlink()
        return real(path, *args, **named)

    monkeypatch.setattr(Path, "open", gone)
    check_files(index)
    assert not journal.exists()
