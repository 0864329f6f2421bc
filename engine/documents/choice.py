"""What of the files in folders is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property

from cache_store.errors import UsageError
from engine.documents.filetypes import TypeChoice
from engine.documents.globs import Glob, Globs, braces


@dataclass(frozen=True)
class FileChoice:
    """Which of the files beneath typed folders are read.

    ignore: ignore files count; hidden, binary: such files are read too, binary ones as far as they
    can be read as text; globs: as in ignore files, but naming what is read, and with `!` what is
    not, the last one that matches counting; types, not_types: see `filetypes`; follow: symbolic
    links are followed; max_bytes: larger files are left out.

    Raises UsageError for a type there is not, or a glob that cannot be read.
    """

    ignore: bool = True
    hidden: bool = False
    binary: bool = False
    globs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    not_types: tuple[str, ...] = ()
    follow: bool = False
    max_bytes: int | None = None
    named: Globs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = []
        for text in self.globs:
            try:
                parts = braces(text.replace(os.sep, "/") if os.sep != "/" else text)
            except ValueError as error:
                raise UsageError(f"a glob stands for {error}", "use fewer braces") from None
            for one in parts:
                glob = Glob.read(f"\\{one}" if one.startswith("#") else one)
                if glob is None:
                    raise UsageError(f"{text!r} is no glob", "give one such as '*.md' or '!old/'")
                found.append(glob)
        object.__setattr__(self, "named", Globs(found))
        self.kinds  # noqa: B018 - what is wrong with it is said now

    @cached_property
    def kinds(self) -> TypeChoice:
        return TypeChoice(self.types, self.not_types)

    def by_name(self, path: str, name: str, folder: bool) -> bool | None:
        """What the globs say of a path: True read it, False leave it out, None nothing. A hidden
        file is chosen by a pattern that begins with a dot only."""
        if not self.named.globs:
            return None
        glob = self.named.match(path, name, folder)
        if glob is None:
            return None if folder or self._only_without else False
        if glob.keep:
            return False
        return True if glob.dotted or not name.startswith(".") else None

    @cached_property
    def _only_without(self) -> bool:
        """Whether the globs only say what is not read."""
        return all(glob.keep for glob in self.named.globs)
