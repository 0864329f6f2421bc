"""The tables of the catalog's database, and the way there from older versions."""

import sqlite3

VERSION = 2

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
_STEPS = (_VERSION_1, _VERSION_2)


def version_of(connection: sqlite3.Connection) -> int | None:
    """The version of a database's tables; 0 for one without any, None for one that isn't ours."""
    # One query, not two: version and tables of one moment.
    ((version, tables),) = connection.execute(
        "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
    )
    return None if tables and not version else int(version)


def bring_up(connection: sqlite3.Connection, version: int) -> None:
    """Makes the tables, or those that `version` didn't have. Within a transaction."""
    for step in _STEPS[version:]:
        for statement in step:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")
