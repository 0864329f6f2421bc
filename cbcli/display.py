"""How the settings want things shown, for `Output`, which is made before they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cache_store.errors import CacheblendError

NAMES = ("progress", "pager")


@dataclass(frozen=True)
class Display:
    """progress: auto, plain or none. pager: whether long text goes to one, or its command."""

    progress: str = "auto"
    pager: bool | str = True

    @classmethod
    def of(cls, options: Mapping[str, object], env: Mapping[str, str]) -> Display:
        """From the settings, with the flags in `options` above them. Where a setting is wrong, as
        the command will tell by itself, these are as by default."""
        from cbcli.settings import load_settings

        try:
            found = load_settings({name: options.get(name) for name in NAMES}, env=env)
        except CacheblendError:
            return cls()
        return cls(found.progress, found.pager)
