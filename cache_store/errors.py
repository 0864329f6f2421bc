"""The errors every package raises; `cbcli.errors` maps each to one line and an exit code."""


class CacheblendError(Exception):
    """Something failed that the user can be told about in one line.

    `message` says what and where, `hint` what to do. `kind` is the stable word that `--json`
    prints; it belongs to the class.
    """

    kind = "failed"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CacheblendError):
    """A flag, setting or argument that cannot be honoured (exit 2)."""

    kind = "usage"


class NotFoundError(CacheblendError):
    """A model, chunk or document that is not there (exit 3)."""

    kind = "not_found"


class IntegrityError(CacheblendError):
    """Stored bytes that are not what was written (exit 4)."""

    kind = "integrity"


class DamagedDatabase(IntegrityError):
    """An index or a catalog that cannot be used: damaged, lost, or not as we write it.

    Chunk files are not at fault: the index is made anew from them by the next ingest.
    """


class StoreBusy(CacheblendError):
    """Another process keeps a database of the store locked, for longer than we wait (exit 1)."""


class NoSpace(CacheblendError):
    """The disk has no space left for what was to be written to a store (exit 1)."""


class StoreFullError(UsageError):
    """A write that would not fit under the store's limit, even after eviction (exit 2)."""

    kind = "store_full"


class DamagedEntry(IntegrityError):
    """A chunk file that is missing, cut short, altered, foreign or of another format version.

    Whoever meets one discards the entry and treats the chunk as a miss.
    """


class UnreadableEntry(CacheblendError):
    """A chunk file that this user may not read (exit 1). It is a miss, too, but may be sound: it
    is not removed, unless what it should hold is stored anew."""


def no_store(root: object) -> NotFoundError:
    """The error of who looks for a store in a folder where none was made yet."""
    return NotFoundError(f"there is no store at {root}", "make one: cacheblend ingest PATH")
