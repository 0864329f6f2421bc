"""Where the value of each setting comes from. The settings are declared in `cbcli.declared`.

flag > environment (`CACHEBLEND_*`) > project `cacheblend.toml` > user's file > default; and of a
file, the profile that is chosen > the file itself. The project file is the nearest one from the
working folder upwards, up to the top of its git repository or the home folder. A key nobody knows
is refused with the nearest one that exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import platformdirs

from cache_store.errors import UsageError
from cache_store.tiers.addresses import masked
from cbcli import values
from cbcli.declaration import ORIGINS as ORIGINS
from cbcli.declaration import PREFIX
from cbcli.declaration import Declared as Declared
from cbcli.declaration import Origin as Origin
from cbcli.declared import DECLARED as DECLARED
from cbcli.declared import LOADERS as LOADERS
from cbcli.declared import POLICIES as POLICIES
from cbcli.declared import Settings as Settings
from cbcli.settings_file import SettingsFile, check_profile
from cbcli.trust import check_trusted
from cbcli.variables import flag_variables
from engine.kinds import unescaped

PROJECT_FILE = "cacheblend.toml"
# Variables that are not settings: where data and the user's file are, tracebacks for bugs, and
# doing without the kernels in C.
RESERVED = ("CACHEBLEND_HOME", "CACHEBLEND_CONFIG", "CACHEBLEND_DEBUG", "CACHEBLEND_NATIVE")


def default_of(setting: Declared, env: Mapping[str, str] = os.environ) -> object:
    """The value a setting has where nobody sets it."""
    default = setting.default
    if default is None:
        return None
    if isinstance(default, str) and default.startswith("{data}/"):
        return data_root(env) / default.removeprefix("{data}/")
    return setting.kind(default)


def data_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where store and models are unless said otherwise: CACHEBLEND_HOME, or the user's data."""
    home = env.get("CACHEBLEND_HOME")
    return Path(home).expanduser().absolute() if home else platformdirs.user_data_path("cacheblend")


def user_file(env: Mapping[str, str] = os.environ) -> Path:
    """The user's own settings file, whether it exists or not."""
    given = env.get("CACHEBLEND_CONFIG")
    if given:
        return Path(given).expanduser().absolute()
    return platformdirs.user_config_path("cacheblend") / "config.toml"


def project_file(cwd: Path | None = None) -> Path | None:
    """The nearest `cacheblend.toml` from `cwd` upwards, or None."""
    start = (cwd or Path.cwd()).absolute()
    for folder in (start, *start.parents):
        if (folder / PROJECT_FILE).is_file():
            return folder / PROJECT_FILE
        if (folder / ".git").exists() or folder == Path.home():
            break
    return None


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Settings:
    """The settings, with `flags` above everything else; None or an empty list is no flag given.

    Raises UsageError for a key nobody knows, a value of the wrong type or out of range, a file that
    isn't TOML or can't be read, and for values that don't go together.
    """
    here = (cwd or Path.cwd()).absolute()
    found: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    for origin, base, raw in _layers(dict(flags or {}), env, here):
        for name, item in raw.items():
            exact = _exact(origin, name, env)
            found[name] = read_value(name, item, exact, base)
            origins[name] = exact
    settings = Settings(**cast(dict[str, Any], found), origins=origins)
    check_trusted(settings, str(user_file(env)))
    if settings.overlap >= settings.chunk_tokens:
        raise UsageError(
            f"overlap is {settings.overlap} ({settings.origin('overlap')}), chunk_tokens "
            f"{settings.chunk_tokens} ({settings.origin('chunk_tokens')})",
            "an overlap must be smaller than the chunk",
        )
    for names in combinations(("ratio", "threshold", "target_kl"), 2):
        both = [settings.origin(name) for name in names]
        # With the ratio auto, a target is what that ratio is never under.
        goes = names == ("ratio", "target_kl") and settings.ratio == values.AUTO
        if not goes and both[0].kind == both[1].kind == "flag":
            raise UsageError(
                f"{both[0].where} and {both[1].where} exclude each other",
                "each says how much to recompute: give one of them",
            )
    return settings


def read_value(name: str, item: object, origin: Origin, base: Path) -> object:
    """The value of setting `name` from `item`, relative paths being relative to `base`.

    Raises UsageError naming the place, the key and the value.
    """
    setting = DECLARED.get(name)
    if setting is None:
        place = origin.where or origin.kind
        raise UsageError(f"{place}: unknown setting {name!r}", _nearest(name, DECLARED))
    kind = setting.kind
    shells = origin.kind in ("flag", "environment")
    if shells and name in ("separator", "text_separator") and isinstance(item, str):
        item = unescaped(item)
    if item is None:
        return None
    try:
        value = kind(item)
    except ValueError as error:
        place = f"{origin.where}: {name}" if origin.kind in ("project", "user") else origin.where
        items = item if isinstance(item, list | tuple) and origin.kind == "flag" else [item]
        shown = " ".join(str(i) if isinstance(i, int | float | Decimal) else repr(i) for i in items)
        if name == "remote":  # passwords may be in it
            shown = repr(masked(str(item)))
        names = str(error).removeprefix("one of ").split(", ") if "one of " in str(error) else []
        near = get_close_matches(str(item), names, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{place} is {shown}", f"expected {error}{meant}") from None
    if isinstance(value, Path):
        return base / value
    if name == "trust" and isinstance(value, tuple):
        return tuple(base / folder for folder in value)
    if name in ("model", "embed_model") and str(value).startswith("."):
        return str(base / str(value))
    if name == "retriever" and ".py:" in str(value):
        return str(base / Path(str(value)).expanduser())
    return value


def problems(path: Path) -> Iterator[UsageError]:
    """What is wrong with a settings file, all of it, its profiles too."""
    try:
        file = SettingsFile.read("project", path)
    except UsageError as error:
        yield error
        return
    for profile in (None, *file.profiles):
        # Of a profile, what it says above the file itself.
        *_, (origin, keys) = file.layers(profile)
        for name, item in keys.items():
            try:
                read_value(name, item, origin, path.parent)
            except UsageError as error:
                yield error


def settings_files(
    env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> list[SettingsFile]:
    """The files that are read, the weaker one first. Raises UsageError."""
    user, found = user_file(env), []
    if user.is_file() or env.get("CACHEBLEND_CONFIG"):
        found.append(SettingsFile.read("user", user))
    project = project_file(cwd)
    if project is not None and project != user:
        found.append(SettingsFile.read("project", project))
    return found


def _layers(
    flags: dict[str, object], env: Mapping[str, str], here: Path
) -> Iterator[tuple[Origin, Path, Mapping[str, object]]]:
    """The layers from the lowest to the highest, each with the folder its paths are relative to."""
    yield Origin("default"), here, {name: default_of(s, env) for name, s in DECLARED.items()}
    files = settings_files(env, here)
    above = [
        (Origin("environment"), here, _environment(env)),
        (Origin("flag"), here, {name: v for name, v in flags.items() if v not in (None, [], ())}),
    ]
    profile: tuple[str, Origin] | None = None
    told = [(Origin(file.kind, str(file.path)), file.path.parent, file.keys) for file in files]
    for origin, base, keys in (*told, *above):
        if "profile" in keys:
            chosen = _exact(origin, "profile", env)
            value = read_value("profile", keys["profile"], chosen, base)
            profile = None if value is None else (str(value), chosen)
    if profile is not None:
        check_profile(*profile, files)
    for file in files:
        for origin, keys in file.layers(profile and profile[0]):
            yield origin, file.path.parent, keys
    yield from above


def _environment(env: Mapping[str, str]) -> dict[str, object]:
    known = {s.variable: name for name, s in DECLARED.items()}
    found: dict[str, object] = {}
    for variable, item in env.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        if variable not in known:
            others = flag_variables(variable)
            if variable in others:
                continue
            raise UsageError(
                f"unknown setting {variable} in the environment",
                _nearest(variable, [*known, *RESERVED, *sorted(others)]),
            )
        # A variable that is empty is as good as unset, but for texts, which can be empty.
        if item or known[variable] in ("system", "separator"):
            found[known[variable]] = item
    return found


def _exact(origin: Origin, name: str, env: Mapping[str, str]) -> Origin:
    """`origin`, naming the variable or flag that sets `name`."""
    setting = DECLARED.get(name)
    if setting is None:
        return origin
    if origin.kind == "environment":
        return Origin(origin.kind, setting.variable)
    if origin.kind == "flag":
        return Origin(origin.kind, setting.flag)
    if origin.kind == "default" and str(setting.default).startswith("{data}"):
        return Origin(origin.kind, "in CACHEBLEND_HOME" if env.get("CACHEBLEND_HOME") else "")
    return origin


def _nearest(word: str, known: Any) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"did you mean {near[0]}?" if near else "see `cacheblend config show` for all of them"
