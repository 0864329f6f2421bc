"""Environment variables: one for every flag.

A setting's is CACHEBLEND_NAME, read by `cbcli.settings`. Any other flag has one of its command:
`--dry-run` of `store rm` is CACHEBLEND_STORE_RM_DRY_RUN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from typer.core import TyperGroup, TyperOption

from cbcli.declaration import PREFIX

Path = tuple[str, ...]
"""A command's names, as they are typed: ("store", "rm")."""


def name_variables(command: Any, path: Path) -> None:
    """Gives every flag of a command, and of the commands in it, its variable."""
    for names, one in walk(command, path):
        for option in _own_options(one):
            option.envvar = variable_of(names, option)
            option.show_envvar = False  # they would take half of the help
        for param in one.params:
            _say_one(param)
        if not isinstance(one, TyperGroup):
            note = "\b\nVariables:\n  CACHEBLEND_NAME for a setting"
            note += f", {_start(names)}NAME for another flag"
            note += "\n  What settings are without a flag: cacheblend config show"
            one.epilog = "\n\n".join(part for part in (one.epilog, note) if part)


def _say_one(param: Any) -> None:
    """Help says what one of several values is: "<str>", not "<list[str]>"."""
    label = param.bare_type() if hasattr(param, "bare_type") else ""
    if label.startswith("list["):
        param.bare_type = partial(str, label.removeprefix("list[").removesuffix("]"))


def variable_of(path: Path, option: TyperOption) -> str:
    """The variable of a command's flag."""
    from cbcli.declared import DECLARED

    setting = setting_of(option)
    if setting:
        return DECLARED[setting].variable
    flag = max(option.opts, key=len)  # the long one
    return _start(path) + flag.strip("-").replace("-", "_").upper()


def setting_of(option: TyperOption) -> str:
    """The name of the setting that a flag is for; empty for another one."""
    from cbcli.declared import DECLARED

    known = option.name in DECLARED and not option.allow_from_autoenv
    return str(option.name) if known else ""


def walk(command: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A command and all that are in it, with their names."""
    yield path, command
    if isinstance(command, TyperGroup):
        group: Any = command  # whose methods get no context: none of ours looks at it
        for name in group.list_commands(None):
            yield from walk(group.get_command(None, name), (*path, name))


def flag_variables(like: str) -> set[str]:
    """The variables of the flags of those commands that could have one called like this. Imports
    no others."""
    from cbcli.main import COMMANDS, app_command

    found = set()
    for name in COMMANDS:
        if like.startswith(_start((name,))):
            for path, command in walk(app_command(name), (name,)):
                found |= {variable_of(path, option) for option in _own_options(command)}
    return found


def wants_json(args: Sequence[str], env: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable asks for the JSON of the command of this line."""
    names = tuple(takewhile(lambda word: word[:1] != "-", args))[:3]
    starts = [_start(names[: n + 1]) for n in range(len(names))]
    return any(
        env.get(f"{start}JSON", "").lower() in ("1", "true", "yes", "on") for start in starts
    )


def _own_options(command: Any) -> Iterator[TyperOption]:
    """Flags that are no settings, but for those that print something and end."""
    for option in command.params:
        if isinstance(option, TyperOption) and not option.is_eager and not setting_of(option):
            yield option


def _start(path: Path) -> str:
    return PREFIX + "".join(f"{name}_" for name in path).replace("-", "_").upper()
