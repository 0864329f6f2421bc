"""How a file is called, and what an operating system's error says of it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_BACKUPS = ("bak", "orig", "old")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def source_of(path: Path) -> str:
    """The absolute path, links in it kept, with forward slashes and printable whatever bytes the
    name has: the same file is the same document from whichever folder it is ingested."""
    if ".." in path.parts:  # behind a link `..` leads elsewhere than the name says
        return shown(os.path.join(os.path.realpath(path.parent), path.name))  # noqa: PTH118
    return shown(os.path.abspath(path))  # noqa: PTH100 - also tidies what Path.absolute() leaves


def shown(path: str) -> str:
    slashes = path.replace(os.sep, "/")
    # An undecodable byte is a lone surrogate here, with the byte as its low eight bits.
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", slashes)


def suffix_of(name: str) -> str:
    """What a file's name ends in, lower-case and without the dot; empty where there is none. What
    editors and backups add ("notes.md~", "notes.md.bak") is passed over."""
    base = name.rsplit("/", 1)[-1].rstrip("~").lower().lstrip(".")
    parts = base.split(".")
    while len(parts) > 2 and parts[-1] in _BACKUPS:
        parts.pop()
    return parts[-1] if len(parts) > 1 else ""


def reason_of(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link that leads nowhere"
    return (error.strerror or str(error)).lower()
