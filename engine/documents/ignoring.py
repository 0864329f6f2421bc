"""Ignore files: which of them hold in a folder, and what they say of what is in it.

`.cacheblendignore` is above `.ignore`, that above `.gitignore`, that above git's `info/exclude`;
among files of one kind the one nearer to a path is above the others. Rules of folders above the
one that is walked hold too, git's up to the top of its repository.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from engine.documents.globs import Globs

OWN_FILE = ".cacheblendignore"
GIT_FILE = ".gitignore"
KINDS = (OWN_FILE, ".ignore", GIT_FILE)  # the strongest first; then git's exclude file
GIT = ".git"
_GIT = KINDS.index(GIT_FILE)
_EXCLUDE = len(KINDS)
_MOST_BYTES = 4 * 2**20

OnError = Callable[[str, OSError], None]
"""Told of an ignore file that cannot be read: its path and why."""


@dataclass(frozen=True)
class _Rules:
    """Patterns of one file. base: how many characters of a path lead to where they count from."""

    globs: Globs
    base: int


@dataclass(frozen=True)
class Rules:
    """The rules that hold in a folder, by kind, of each kind the nearest first."""

    kinds: tuple[tuple[_Rules, ...], ...] = ((),) * (len(KINDS) + 1)

    def inside(self, folder: str, names: Collection[str], on_error: OnError) -> Rules:
        """The rules that hold in `folder`, an absolute path, given those of the folder around it.
        names: of what is in it, as far as it is known to be there."""
        if GIT not in names and not any(kind in names for kind in KINDS):
            return self
        kinds = list(self.kinds)
        if GIT in names:  # a repository of its own
            kinds[_GIT] = ()
            kinds[_EXCLUDE] = _read(_exclude_file(folder), folder, on_error)
        for number, kind in enumerate(KINDS):
            if kind in names:
                kinds[number] = _read(f"{folder}/{kind}", folder, on_error) + kinds[number]
        return Rules(tuple(kinds))

    def reason(self, path: str, name: str, folder: bool, hidden: bool) -> str:
        """Why `path`, absolute, its last part `name`, is left out; empty where it isn't.

        hidden: hidden files are read too. Else they are where a rule that isn't git's says so with
        a pattern that begins with a dot, as `!.notes/`.
        """
        for number, rules in enumerate(self.kinds):
            for one in rules:
                glob = one.globs.match(path[one.base :], name, folder)
                if glob is None:
                    continue
                if not glob.keep:
                    return "ignored"
                shown = hidden or (glob.dotted and number < _GIT)
                return "hidden" if name.startswith(".") and not shown else ""
        return "hidden" if name.startswith(".") and not hidden else ""


def rules_above(folder: str, on_error: OnError) -> Rules:
    """The rules that folders above `folder`, an absolute path without links, set for it."""
    parents = [str(parent) for parent in Path(folder).parents]
    if _is_there(f"{folder}/{GIT}"):
        top = 0
    else:
        top = next((n for n, up in enumerate(parents, 1) if _is_there(f"{up}/{GIT}")), 0)
    rules = Rules()
    for number, parent in reversed(list(enumerate(parents, 1))):
        kinds = (*KINDS, GIT) if number <= top else [kind for kind in KINDS if kind != GIT_FILE]
        there = {kind for kind in kinds if _is_there(f"{parent}/{kind}")}
        rules = rules.inside(parent.rstrip("/"), there, on_error)
    return rules


def _read(path: str, folder: str, on_error: OnError) -> tuple[_Rules, ...]:
    """The rules in a file, if there are any."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - paths here are plain text
            return ()
        with open(path, "rb") as file:  # noqa: PTH123
            raw = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        on_error(path, error)
        return ()
    text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    globs = Globs.read(text.split("\n"))
    return (_Rules(globs, len(folder) + 1),) if globs.globs else ()


def _exclude_file(folder: str) -> str:
    """Git's exclude file of a repository; `.git` is a file in a worktree or submodule."""
    git = Path(folder, GIT)
    try:
        if git.is_file():
            text = git.read_text("utf-8").partition("gitdir:")[2].strip()
            git = Path(folder, text)
            common = git / "commondir"
            if common.is_file():
                git = git / common.read_text("utf-8").strip()
    except (OSError, ValueError):
        pass
    return str(git / "info" / "exclude")


def _is_there(path: str) -> bool:
    return os.path.lexists(path)
