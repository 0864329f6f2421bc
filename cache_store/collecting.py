"""Collections: documents of a store that are chosen together, by a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from cache_store.catalog_database import CatalogDatabase
from cache_store.collection_name import MAX_NAME, NAME_RULE, is_collection_name
from cache_store.errors import NotFoundError, UsageError
from cache_store.schema import raw


def check_collection_name(name: str) -> str:
    """The name. Raises UsageError for one that no collection can have."""
    if not is_collection_name(name):
        raise UsageError(f"{name[:MAX_NAME]!r} is no name of a collection", f"use {NAME_RULE}")
    return name


@dataclass(frozen=True)
class CollectionInfo:
    """A collection. documents: how many are in it; chunks and tokens: of all of them together, a
    chunk that two documents have counted twice."""

    name: str
    documents: int
    chunks: int
    tokens: int


class CollectionTable(CatalogDatabase):
    """What the catalog knows of collections. One is there as long as a document is in it."""

    def collect(self, name: str, sources: Iterable[str]) -> int:
        """Puts documents into a collection; how many weren't in it before.

        Raises UsageError for a name that no collection can have.
        """
        check_collection_name(name)
        held = {
            str(row[0]) for row in self.ask("SELECT source FROM collection WHERE name = ?", (name,))
        }
        rows = [(name, raw(source)) for source in dict.fromkeys(sources) if source not in held]
        if not rows:  # nothing is written, so that nobody looks again at what hasn't changed
            return 0
        sql = "SELECT count(*) FROM collection WHERE name = ?"
        with self.writing() as db:
            before = db.execute(sql, (name,)).fetchone()[0]
            db.executemany(
                "INSERT OR IGNORE INTO collection (name, source) VALUES (?, CAST(? AS TEXT))", rows
            )
            return int(db.execute(sql, (name,)).fetchone()[0] - before)

    def uncollect(self, name: str, sources: Iterable[str] | None = None) -> int:
        """Takes documents, or all of them, out of a collection; how many were in it. They stay in
        the store."""
        with self.writing() as db:
            if sources is None:
                return db.execute("DELETE FROM collection WHERE name = ?", (name,)).rowcount
            return db.executemany(
                "DELETE FROM collection WHERE name = ? AND source = CAST(? AS TEXT)",
                [(name, raw(source)) for source in sources],
            ).rowcount

    def collections(self) -> dict[str, list[str]]:
        """By name, in the names' order, the documents of each, in the order of `documents`."""
        found: dict[str, list[str]] = {}
        for name, source in self.ask(
            "SELECT name, source FROM collection JOIN document USING (source)"
            " ORDER BY name, place, source"
        ):
            found.setdefault(name, []).append(source)
        return found

    def collections_of(self, source: str) -> list[str]:
        """Names of the collections a document is in, in their order."""
        rows = self.ask(
            "SELECT name FROM collection WHERE source = CAST(? AS TEXT) ORDER BY name",
            (raw(source),),
        )
        return [str(row[0]) for row in rows]

    def collection_infos(self) -> list[CollectionInfo]:
        """All collections, in the names' order."""
        rows = self.ask(
            "SELECT name, count(*), sum(chunks), sum(tokens) FROM collection"
            " JOIN document USING (source) GROUP BY name ORDER BY name"
        )
        return [CollectionInfo(*row) for row in rows]

    def require_collections(self, names: Sequence[str]) -> None:
        """Raises NotFoundError for a collection that isn't there, naming the nearest that is."""
        if not names:
            return
        known = [str(row[0]) for row in self.ask("SELECT DISTINCT name FROM collection")]
        for name in names:
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.5)
                raise NotFoundError(
                    f"no collection {name[:MAX_NAME]!r} in the store",
                    f"did you mean {near[0]!r}?"
                    if near
                    else "cacheblend store collections lists them"
                    if known
                    else "cacheblend ingest --collection NAME makes one",
                )


def members(names: Sequence[str]) -> str:
    """SQL for the sources of the documents in any of so many collections, whose names are the
    query's next values."""
    marks = ",".join("?" * len(names))
    return f"SELECT source FROM collection WHERE name IN ({marks})"
