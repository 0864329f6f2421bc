"""Kinds of file by name, for --type and --type-not: the kinds of document there are, the
programming languages, and `code` for all of those."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache

from cache_store.errors import UsageError
from engine.documents.kinds import KIND_OF_SUFFIX
from engine.documents.languages import named_files

# Ways to write text that have names of their own, though all are read alike.
_TEXTS = ("rst", "adoc", "org", "log", "tex", "srt", "vtt")
_OTHER_NAMES = {"txt": "text", "asciidoc": "adoc", "jupyter": "notebook", "bash": "shell"}


@cache
def file_types() -> dict[str, tuple[str, ...]]:
    """What files of each type are called, in small letters: `*.md`, or a whole name."""
    names: dict[str, list[str]] = {}
    for suffix, kind in KIND_OF_SUFFIX.items():
        names.setdefault(kind, []).append(f"*.{suffix}")
    names |= {text: [f"*.{text}"] for text in _TEXTS}
    languages = named_files()
    code = sorted({pattern for patterns in languages.values() for pattern in patterns})
    names |= {**languages, "code": code}
    return {name: tuple(names[name]) for name in sorted(names)}


class TypeChoice:
    """Files of some types, and not of others. Raises UsageError for a type there is not."""

    def __init__(self, types: Iterable[str], not_types: Iterable[str]) -> None:
        self._wanted = _Names(types)
        self._refused = _Names(not_types)

    def takes(self, name: str) -> bool:
        name = name.lower()
        if self._refused and name in self._refused:
            return False
        return not self._wanted or name in self._wanted


class _Names:
    """All names that files of some types have."""

    def __init__(self, types: Iterable[str]) -> None:
        patterns = {pattern for name in types for pattern in file_types()[known_type(name)]}
        self._ends = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*"))
        self._whole = {pattern for pattern in patterns if not pattern.startswith("*")}

    def __bool__(self) -> bool:
        return bool(self._ends or self._whole)

    def __contains__(self, name: str) -> bool:
        return name.endswith(self._ends) or name in self._whole


def known_type(name: str) -> str:
    """The type of this name, or whose files end so: `markdown` for "md". Raises UsageError."""
    plain = name.strip().lower().removeprefix("*").removeprefix(".")
    plain = _OTHER_NAMES.get(plain, plain)
    types = file_types()
    if plain in types:
        return plain
    with_end = [one for one, patterns in types.items() if f"*.{plain}" in patterns]
    if with_end:
        return next((one for one in with_end if one != "code"), with_end[0])
    near = get_close_matches(plain, types, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"no file type {name!r}", f"{advice}`cacheblend ingest --type-list` shows all of them"
    )
