"""Names of entries in a remote store: `v1/GROUP/ENTRY`, after the version of the chunk file."""

from __future__ import annotations

import re

from cache_store.keys import FORMAT_VERSION

ROOT = f"v{FORMAT_VERSION}/"
_NAME = re.compile(rf"v{FORMAT_VERSION}/([0-9a-f]{{64}})/([0-9a-f]{{64}})")


def group_prefix(group: str) -> str:
    """What the names of a group's entries begin with."""
    return f"{ROOT}{group}/"


def entry_name(group: str, key: str) -> str:
    return f"{ROOT}{group}/{key}"


def group_and_key(name: str) -> tuple[str, str] | None:
    """What a name stands for; None for one that isn't ours."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None
