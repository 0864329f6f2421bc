"""The tables of the catalog's database, and the way there from older versions."""

import contextlib
import functools
import sqlite3

from cache_store.errors import IntegrityError

VERSION = 3
NEWEST = 1000
"""No later version of the catalog will have a greater number: one that has is damaged."""

_VERSION_1 = (
    "CREATE TABLE document (source TEXT PRIMARY KEY, digest TEXT NOT NULL, settings TEXT NOT NULL,"
    " chunks INTEGER NOT NULL, tokens INTEGER NOT NULL, ingested_at REAL NOT NULL,"
    " place INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE chunk (source TEXT NOT NULL, ordinal INTEGER NOT NULL, chunk_id TEXT NOT NULL,"
    " text TEXT NOT NULL, tokens INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,"
    " PRIMARY KEY (source, ordinal))",
    "CREATE INDEX chunk_by_id ON chunk (chunk_id)",
    "CREATE TABLE model (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE revision (value INTEGER NOT NULL)",
    "INSERT INTO revision VALUES (0)",
)
_VERSION_2 = (
    # Pinned documents' chunks are not evicted. size and mtime_ns: of the file when it was read,
    # so that a changed one is noticed without reading it; -1 and 0 where that isn't known.
    "ALTER TABLE document ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE document ADD COLUMN size INTEGER NOT NULL DEFAULT -1",
    "ALTER TABLE document ADD COLUMN mtime_ns INTEGER NOT NULL DEFAULT 0",
    # What happened to the store, by name: misses and their reasons, evictions.
    "CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    # Properties of the store that every process obeys, such as the order of eviction.
    "CREATE TABLE property (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # Entries that a remote store is still to be given.
    "CREATE TABLE upload (key TEXT PRIMARY KEY) WITHOUT ROWID",
)
_VERSION_3 = (
    # What a document's file is: text, markdown, pdf; empty where that was not recorded.
    "ALTER TABLE document ADD COLUMN kind TEXT NOT NULL DEFAULT ''",
    # Where in its file a chunk stands, such as pages 3 to 4, and under which headings.
    "ALTER TABLE chunk ADD COLUMN unit TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE chunk ADD COLUMN first INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE chunk ADD COLUMN last INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE chunk ADD COLUMN headings TEXT NOT NULL DEFAULT '[]'",
    # Documents that are chosen together; one may be in several collections.
    "CREATE TABLE collection (name TEXT NOT NULL, source TEXT NOT NULL,"
    " PRIMARY KEY (name, source)) WITHOUT ROWID",
    "CREATE INDEX collection_by_source ON collection (source)",
)
_STEPS = (_VERSION_1, _VERSION_2, _VERSION_3)


def version_of(connection: sqlite3.Connection) -> int | None:
    """The version of a database's tables; 0 for one without any, None for one that isn't ours."""
    # One query, not two: version and tables of one moment.
    ((version, tables),) = connection.execute(
        "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
    )
    return None if tables and not version else int(version)


def strange_object(connection: sqlite3.Connection) -> str:
    """The name of a table, index, view or trigger that we'd never make; empty if there is none."""
    strange = set(connection.execute(_OBJECTS)) - _own_objects()
    return min((str(name) for name, *_ in strange), default="")


_OBJECTS = "SELECT name, type, tbl_name, sql LIKE '%VIRTUAL%' FROM sqlite_master"


@functools.cache
def _own_objects() -> frozenset[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        bring_up(empty, 0)
        return frozenset(empty.execute(_OBJECTS))


def bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Makes the tables, or those that `version` didn't have. Within a transaction."""
    for step in _STEPS[version:]:
        for statement in step:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def raw(text: str) -> bytes:
    """Text as SQLite is to keep it, whatever it holds."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """The text that `raw` gave. Raises IntegrityError."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise IntegrityError(
            "the catalog holds text that was altered", "ingest the documents again"
        ) from error
