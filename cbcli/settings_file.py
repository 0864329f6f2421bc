"""Settings files: their own keys, their profiles, and which profile is chosen.

profile = "fast"          # in a file without tables of profiles, or
[profile]
use = "fast"              # in one with them

[profile.fast]            # keys above those of the file itself
ratio = 0.05
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path

import tomli

from cache_store.errors import UsageError
from cbcli.declaration import Origin
from cbcli.values import profile_name

PROFILES, USE = "profile", "use"
NAME_RULE = "use up to 80 letters, digits, - and _"


@dataclass(frozen=True)
class SettingsFile:
    """What a file says, as it is written. kind: project or user. keys: its own, `profile` among
    them where it chooses one; profiles: the keys of each, by name."""

    kind: str
    path: Path
    keys: Mapping[str, object]
    profiles: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @classmethod
    def read(cls, kind: str, path: Path) -> SettingsFile:
        """Raises UsageError for a file that can't be read or isn't TOML, and for profiles that are
        no tables."""
        keys = read_toml(path)
        table = keys.get(PROFILES)
        if not isinstance(table, Mapping):
            return cls(kind, path, keys)
        del keys[PROFILES]
        profiles = {}
        for name, item in table.items():
            where = f"{path}: [{PROFILES}]"
            if isinstance(item, Mapping):
                if not _is_name(name):
                    raise UsageError(f"{where}: {name!r} is no name of a profile", NAME_RULE)
                if PROFILES in item:
                    raise UsageError(
                        f"{path} [{PROFILES}.{name}]: a profile can't choose another",
                        f'the file can: {USE} = "{name}" in [{PROFILES}]',
                    )
                profiles[name] = item
            elif name == USE:
                keys[PROFILES] = item
            else:
                raise UsageError(
                    f"{where}: {name!r} is no table of a profile",
                    f'profiles are tables: [{PROFILES}.NAME]; {USE} = "NAME" chooses one',
                )
        return cls(kind, path, keys, profiles)

    def layers(self, profile: str | None) -> Iterable[tuple[Origin, Mapping[str, object]]]:
        """Its own keys, and above them those of the profile, if it has it."""
        yield Origin(self.kind, str(self.path)), self.keys
        if profile is not None and profile in self.profiles:
            yield self.origin(profile), self.profiles[profile]

    def origin(self, profile: str) -> Origin:
        """Where a key of a profile comes from."""
        return Origin(self.kind, f"{self.path} [{PROFILES}.{profile}]", above=True)


def check_profile(name: str, origin: Origin, files: Iterable[SettingsFile]) -> None:
    """Raises UsageError for a profile that none of the files has, naming the nearest."""
    known = list(dict.fromkeys(profile for file in files for profile in file.profiles))
    if name in known:
        return
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    raise UsageError(
        f"{origin}: no profile {name!r}",
        f"did you mean {near[0]}?"
        if near
        else f"there are {', '.join(known)}"
        if known
        else f"write one into cacheblend.toml: [{PROFILES}.{name}]",
    )


def _is_name(name: str) -> bool:
    try:
        return profile_name(name) is not None
    except ValueError:
        return False


def read_toml(path: Path) -> dict[str, object]:
    """The keys of a settings file as they are. Raises UsageError."""
    try:
        return tomli.loads(path.read_text(encoding="utf-8-sig"), parse_float=Decimal)
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}", "see `cacheblend config init`") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "check that path") from None
