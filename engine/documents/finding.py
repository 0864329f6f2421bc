"""Paths to files: what is read of what the user typed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from cache_store.errors import NotFoundError
from engine.documents.document import STDIN, Found, FoundFile, Skipped, Unreadable
from engine.documents.names import reason_of, shown, source_of


def find_files(
    paths: Iterable[str | os.PathLike[str]], *, stdin_name: str = "stdin"
) -> list[Found]:
    """The files behind `paths`, each once and in the order typed, folders recursively and sorted.

    Hidden files and folders inside folders are passed over, symbolic links there are not
    followed; what the user typed is followed and tried whatever its name.

    Raises NotFoundError for a typed path that does not exist.
    """
    found: list[Found] = []
    seen: set[str] = set()
    for typed in paths:
        if os.fspath(typed) == STDIN:
            found.append(FoundFile(stdin_name, None, named=True))
            continue
        path = Path(typed)
        missing = NotFoundError(
            f"no file or folder '{shown(os.fspath(typed))}'", "check the path's spelling"
        )
        if not os.fspath(typed):  # Path("") would be the current folder
            raise missing
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise missing from None
        except OSError as error:
            found.append(Unreadable(source_of(path), reason_of(error)))
            continue
        found += _walk(path) if stat.S_ISDIR(mode) else [FoundFile(source_of(path), path, True)]
    return [item for item in found if _first_time(item, seen)]


def _walk(folder: Path) -> Iterator[Found]:
    """Everything under `folder`, sorted by name at each level, without recursion."""
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            mode = path.stat(follow_symlinks=path is folder).st_mode
            if stat.S_ISLNK(mode):
                yield _link(path)
            elif not stat.S_ISDIR(mode):
                yield FoundFile(source_of(path), path, named=False)
            else:
                inside = sorted(path.iterdir(), key=lambda entry: entry.name, reverse=True)
                waiting += [entry for entry in inside if not entry.name.startswith(".")]
        except OSError as error:
            yield Unreadable(source_of(path), reason_of(error))


def _link(path: Path) -> Unreadable | Skipped:
    if path.exists():
        return Skipped(source_of(path), "symbolic link")
    return Unreadable(source_of(path), "is a broken symbolic link")


def _first_time(item: Found, seen: set[str]) -> bool:
    """Whether the file was not found before, under whatever name."""
    if not isinstance(item, FoundFile):
        key = f"{type(item).__name__} {item.source}"
    else:
        key = STDIN if item.path is None else os.path.realpath(item.path)
    known = key in seen
    seen.add(key)
    return not known
