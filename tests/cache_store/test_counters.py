"""Counts that outlast the process and add up over processes."""

from __future__ import annotations

from pathlib import Path

from cache_store.catalog import Catalog
from cache_store.counters import Counters


def test_counts_add_up_over_stores(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalogs = [Catalog(path, read_only=False) for _ in range(2)]
    first, second = (Counters(catalog, read_only=False) for catalog in catalogs)
    first.add("miss.damaged")
    first.add("eviction", 3)
    assert first.read() == {"eviction": 3, "miss.damaged": 1}
    assert second.read() == {}
    first.flush()
    first.flush()
    second.add("eviction")
    second.flush()
    assert first.read() == second.read() == {"eviction": 4, "miss.damaged": 1}
    for catalog in catalogs:
        catalog.close()


def test_what_cannot_be_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog, other = Catalog(path, read_only=False), Catalog(path, read_only=False)
    catalog._db.execute("PRAGMA busy_timeout = 10")
    counters = Counters(catalog, read_only=False)
    counters.add("miss.absent", 2)
    with other.writing():
        counters.flush()
    assert counters.read() == {"miss.absent": 2}
    counters.flush()
    assert Counters(other, read_only=True).read() == {"miss.absent": 2}
    catalog.close()
    other.close()
