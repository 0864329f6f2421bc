"""Paths to files: what is read of what the user typed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.errors import NotFoundError
from engine.documents.choice import FileChoice
from engine.documents.document import STDIN, Found, FoundFile, Skipped, Unreadable
from engine.documents.names import reason_of, shown, source_of
from engine.documents.walking import Identity, Walk

_USUAL = FileChoice()


def find_files(
    paths: Iterable[str | os.PathLike[str]],
    *,
    stdin_name: str = "stdin",
    choice: FileChoice = _USUAL,
    listed: Iterable[str] = (),
) -> Iterator[Found]:
    """The files behind `paths`, each once and in the order typed, folders recursively and sorted;
    before them those of `listed`, a list of files that something else has made.

    Found one by one as they are asked for, whatever the size of the tree. In folders `choice` says
    what is read; what the user typed is followed and tried whatever it is. What is listed is tried
    whatever its place, but is of the type, name and size that `choice` wants; what is not there is
    `Unreadable`.

    Raises NotFoundError, at once, for a typed path that does not exist.
    """
    typed: list[_Typed] = []
    for path in paths:
        if os.fspath(path) == STDIN:
            typed.append(_Typed(None))
        else:
            typed.append(_Typed.of(Path(path), os.fspath(path)))
    return _found(typed, stdin_name, choice, listed)


@dataclass(frozen=True)
class _Typed:
    """A path the user typed, None for standard input. key: identity of its folder and its name, of
    what it leads to; problem: why it can't be looked at."""

    path: Path | None
    folder: bool = False
    key: tuple[Identity, str] | None = None
    problem: str = ""

    @classmethod
    def of(cls, path: Path, given: str) -> _Typed:
        missing = NotFoundError(f"no file or folder '{shown(given)}'", "check the path's spelling")
        if not given:  # Path("") would be the current folder
            raise missing
        try:
            if stat.S_ISDIR(path.stat().st_mode):
                return cls(path, folder=True)
            return cls(path, key=_key(os.path.realpath(path)))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            raise missing from None
        except OSError as error:
            return cls(path, problem=reason_of(error))


def _found(
    typed: list[_Typed], stdin_name: str, choice: FileChoice, listed: Iterable[str]
) -> Iterator[Found]:
    walk = Walk(choice)
    walk.typed |= {item.key for item in typed if item.key is not None}
    yield from _Listing(choice, walk).files(listed)
    told: set[str] = set()
    for item in typed:
        if item.path is None:
            if STDIN not in told:
                told.add(STDIN)
                yield FoundFile(stdin_name, None, named=True)
        elif item.problem:
            source = source_of(item.path)
            if source not in told:
                told.add(source)
                yield Unreadable(source, item.problem)
        elif item.folder:
            yield from walk.folder(item.path)
        elif item.key not in walk.done and item.key is not None:
            walk.done.add(item.key)
            yield FoundFile(source_of(item.path), item.path, named=True)


@dataclass(frozen=True)
class _Listing:
    """The files of a list, such as another command makes."""

    choice: FileChoice
    walk: Walk
    folders: dict[str, Identity] = field(default_factory=dict)  # by path, for speed

    def files(self, listed: Iterable[str]) -> Iterator[Found]:
        for given in listed:
            path = Path(given)
            try:
                status = os.lstat(path)
                link = stat.S_ISLNK(status.st_mode)
                real = os.path.realpath(path) if link else given
                if link:
                    status = os.stat(path)  # noqa: PTH116
                if stat.S_ISDIR(status.st_mode):
                    yield from self.walk.folder(path)
                    continue
                key = _key(real, self.folders)
            except (OSError, ValueError) as error:
                what = reason_of(error) if isinstance(error, OSError) else "is no path"
                yield Unreadable(source_of(path), what)
                continue
            if key not in self.walk.done:
                self.walk.done.add(key)
                yield self._file(path, Path(real), status.st_size, key in self.walk.typed)

    def _file(self, path: Path, real: Path, size: int, typed: bool) -> Found:
        source = source_of(path)
        if typed:
            return FoundFile(source, real, named=True)
        below = Path(os.path.relpath(path)).as_posix()
        if self.choice.by_name(below, path.name, folder=False) is False:
            return Skipped(source, "other name")
        if not self.choice.kinds.takes(path.name):
            return Skipped(source, "other type")
        if self.choice.max_bytes is not None and size > self.choice.max_bytes:
            return Skipped(source, "too large")
        return FoundFile(source, real, named=False, binary=self.choice.binary)


def _key(path: str, known: dict[str, Identity] | None = None) -> tuple[Identity, str]:
    folder, name = os.path.split(path)
    folder = folder or "."
    identity = None if known is None else known.get(folder)
    if identity is None:
        status = os.stat(folder)  # noqa: PTH116
        identity = status.st_dev, status.st_ino
        if known is not None:
            known[folder] = identity
    return identity, name


def lines_of(raw: bytes, *, null: bool) -> list[str]:
    """The names in a list of files: separated by line ends, or by NUL characters."""
    parts = raw.split(b"\0") if null else [line.removesuffix(b"\r") for line in raw.split(b"\n")]
    return [os.fsdecode(part) for part in parts if part]
