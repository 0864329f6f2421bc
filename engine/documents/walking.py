"""What lies in a folder, one item at a time: a tree of any size costs the memory of the folders
on the way to where the walk is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.documents.choice import FileChoice
from engine.documents.document import Found, FoundFile, Skipped, Unreadable
from engine.documents.ignoring import Rules, rules_above
from engine.documents.names import reason_of, shown, source_of

Identity = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True)
class Folder:
    """A folder to walk. path: as the system takes it; source: as it is shown; real: absolute and,
    but for links that were followed, without links; link: reached through one."""

    path: str
    source: str
    real: str
    link: bool = False


@dataclass(frozen=True)
class _Listed:
    """A folder's entries that are still to be looked at."""

    folder: Folder
    identity: Identity
    rules: Rules
    entries: Iterator[os.DirEntry[str]]


class Walk:
    """Walks folders, each once: what was walked before, under whatever name, is not walked again.

    done: files that were found already, and typed: those the user typed and that are therefore
    read whatever rules say; each by its folder's identity and its name. A file of `typed` that is
    come upon is found there and then, and put in `done`.
    """

    def __init__(self, choice: FileChoice) -> None:
        self.done: set[tuple[Identity, str]] = set()
        self.typed: set[tuple[Identity, str]] = set()
        self._choice = choice
        self._folders: set[Identity] = set()
        self._here = os.path.realpath(Path.cwd())
        self._unread: list[Unreadable] = []

    def folder(self, path: Path) -> Iterator[Found]:
        """Everything in a folder the user named, sorted by name at each level. Links that are
        followed come last, so that a folder is known by its own name where it has one here."""
        root = Folder(os.fspath(path), source_of(path), os.path.realpath(path))
        under_here = root.real == self._here or root.real.startswith(self._here.rstrip("/") + "/")
        base = len((self._here if under_here else root.real).rstrip("/")) + 1
        rules = rules_above(root.real, self._cannot_read) if self._choice.ignore else Rules()
        links: list[tuple[Folder, Rules]] = [(root, rules)]
        while links:
            folder, rules = links.pop(0)
            stack: list[_Listed] = []
            yield from self._enter(folder, rules, stack)
            while stack:
                entry = next(stack[-1].entries, None)
                if entry is None:
                    stack.pop()
                else:
                    yield from self._entry(entry, stack, links, base)

    def _enter(self, folder: Folder, rules: Rules, stack: list[_Listed]) -> Iterator[Found]:
        """Lists a folder, and puts it on the stack."""
        entries: list[os.DirEntry[str]] = []
        identity = (0, 0)
        try:
            status = os.stat(folder.path)  # noqa: PTH116 - paths here are plain text, for speed
            identity = status.st_dev, status.st_ino
            if identity in self._folders:
                if folder.link:
                    yield Skipped(folder.source, "symbolic link")
                return
            self._folders.add(identity)
            with os.scandir(folder.path) as found:
                entries += found
        except OSError as error:
            yield Unreadable(folder.source, reason_of(error))
        if not entries:
            return
        entries.sort(key=lambda entry: entry.name)
        if self._choice.ignore:
            names = {entry.name for entry in entries if entry.name.startswith(".")}
            rules = rules.inside(folder.real.rstrip("/"), names, self._cannot_read)
            yield from self._unread
            self._unread.clear()
        stack.append(_Listed(folder, identity, rules, iter(entries)))

    def _entry(
        self,
        entry: os.DirEntry[str],
        stack: list[_Listed],
        links: list[tuple[Folder, Rules]],
        base: int,
    ) -> Iterator[Found]:
        listed, name, choice = stack[-1], entry.name, self._choice
        source = f"{listed.folder.source.rstrip('/')}/{shown(name)}"
        key = (listed.identity, name)
        try:
            link = entry.is_symlink()
            if not link and key in self.done:
                return
            if not link and key in self.typed:
                self.done.add(key)
                yield FoundFile(source, Path(entry.path), named=True)
                return
            folder = entry.is_dir(follow_symlinks=choice.follow)
            real = f"{listed.folder.real.rstrip('/')}/{name}"
            reason = self._left_out(listed.rules, real, name, folder, base)
            if reason:
                yield Skipped(source, reason)
            elif link and not entry.is_dir() and not entry.is_file() and not _leads(entry.path):
                yield Unreadable(source, "is a broken symbolic link")
            elif link and not choice.follow:
                yield Skipped(source, "symbolic link")
            elif folder:
                inside = Folder(entry.path, source, real, link)
                if link:
                    links.append((inside, listed.rules))
                else:
                    yield from self._enter(inside, listed.rules, stack)
            elif choice.max_bytes is not None and entry.stat().st_size > choice.max_bytes:
                yield Skipped(source, "too large")
            else:
                path = os.path.realpath(entry.path) if link else entry.path
                yield FoundFile(source, Path(path), named=False, binary=choice.binary)
        except OSError as error:
            yield Unreadable(source, reason_of(error))

    def _left_out(self, rules: Rules, path: str, name: str, folder: bool, base: int) -> str:
        """Why a path is left out by its name; empty where it isn't."""
        choice = self._choice
        chosen = choice.by_name(path[base:], name, folder)
        if chosen is False:
            return "other name"
        if chosen is None:
            reason = rules.reason(path, name, folder, choice.hidden)
            if reason:
                return reason
        if not folder and not choice.kinds.takes(name):
            return "other type"
        return ""

    def _cannot_read(self, path: str, error: OSError) -> None:
        self._unread.append(Unreadable(source_of(Path(path)), f"its rules: {reason_of(error)}"))


def _leads(path: str) -> bool:
    """Whether a link leads to anything, be it a pipe."""
    return Path(path).exists()
