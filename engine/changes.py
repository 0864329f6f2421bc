"""Whether a document is still what was ingested of it."""

from pathlib import Path
from typing import Literal

from cache_store.catalog import DocumentInfo
from engine.documents import Document, FoundFile, read_document

Change = Literal["same", "touched", "changed", "gone"]


def change_of(info: DocumentInfo) -> Change:
    """ "same" where size and time of its file are, or it was read from no file here. Only where
    they differ it is read: "touched" where its text is the same, else "changed". "gone": there is
    no such file any more. One that can't be looked at counts as the same."""
    if info.size < 0:
        return "same"
    try:
        status = Path(info.source).stat()
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    except (OSError, ValueError):
        return "same"
    if (status.st_size, status.st_mtime_ns) == (info.size, info.mtime_ns):
        return "same"
    found = read_document(FoundFile(info.source, Path(info.source), named=True))
    same = isinstance(found, Document) and found.digest == info.digest
    return "touched" if same else "changed"


def missing_files(documents: list[DocumentInfo]) -> frozenset[str]:
    """Sources of those of the documents that were read from files here that are gone."""
    return frozenset(info.source for info in documents if info.size >= 0 and _is_gone(info.source))


def _is_gone(source: str) -> bool:
    try:
        Path(source).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False
