"""Documents whose chunks are never evicted."""

from __future__ import annotations

from collections.abc import Iterable

from cache_store.catalog import Catalog

_AT_ONCE = 200  # documents in one transaction


class Pins:
    """What the catalog says of pins; for every process."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: tuple[int, set[str]] = (-1, set())

    def pin(self, sources: Iterable[str], pinned: bool = True) -> int:
        """Has the documents' chunks never evicted, or no longer so; how many that changes."""
        changed, raw = 0, [source.encode("utf-8", "surrogatepass") for source in sources]
        for start in range(0, len(raw), _AT_ONCE):
            with self._catalog.writing() as db:
                for source in raw[start : start + _AT_ONCE]:
                    found = db.execute(
                        "UPDATE document SET pinned = ?"
                        " WHERE source = CAST(? AS TEXT) AND pinned != ?",
                        (pinned, source, pinned),
                    )
                    changed += found.rowcount
        return changed

    def documents(self) -> list[str]:
        """The pinned documents, in the documents' order."""
        rows = self._catalog.ask("SELECT source FROM document WHERE pinned ORDER BY place, source")
        return [source for (source,) in rows]

    def chunks(self) -> set[str]:
        """Ids of the chunks of pinned documents."""
        revision = self._catalog.revision
        if self._known[0] != revision:
            rows = self._catalog.ask(
                "SELECT DISTINCT chunk_id FROM chunk JOIN document USING (source) WHERE pinned"
            )
            self._known = revision, {name for (name,) in rows}
        return self._known[1]
