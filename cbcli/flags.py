"""Flags made from the settings: a command names the groups it takes.

    @app.command(epilog=...)
    @flags.with_settings(flags.RETRIEVAL, flags.BLEND, "live", without=("loader",))
    def ask(question: ..., options: flags.Options = flags.NONE, json: Json = False, ...) -> None:
        settings = load_settings(options)

The command gets a flag for every setting of those groups and for those named, in that order, at
the place of its parameter `options`; `options` has what was given on the command line, None where
a flag wasn't. A setting that is declared with one of the groups is a flag of all its commands.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer

from cbcli import completion, values
from cbcli.declaration import BLEND as BLEND
from cbcli.declaration import CHUNKING as CHUNKING
from cbcli.declaration import ENGINE as ENGINE
from cbcli.declaration import FILES as FILES
from cbcli.declaration import MODEL as MODEL
from cbcli.declaration import PROMPT as PROMPT
from cbcli.declaration import RETRIEVAL as RETRIEVAL
from cbcli.declaration import SAMPLING as SAMPLING
from cbcli.declaration import STORE as STORE
from cbcli.declaration import TRACE as TRACE
from cbcli.declaration import Declared
from cbcli.declared import DECLARED

Options = Mapping[str, object]
"""Settings that were given as flags, by name; None or an empty list where one wasn't."""

NONE: Options = MappingProxyType({})

PARAMETER = "options"
_NUMBERS = {"int": int, "float": float}

Compare = Annotated[bool, typer.Option("--compare", help="Also run a full prefill, and compare.")]

Collection = Annotated[
    list[str] | None,
    typer.Option(
        "--collection",
        metavar="NAME",
        help="The documents of this collection; repeatable.",
        autocompletion=completion.collections,
    ),
]


def chunks_option(help: str) -> Any:
    """The flag that names chunks one by one."""
    return typer.Option("--chunk", "-c", help=help, autocompletion=completion.chunks)


def chunks_argument(help: str) -> Any:
    return typer.Argument(help=help, metavar="[ID]...", autocompletion=completion.chunks)


def documents_option(help: str) -> Any:
    """The flag that names documents one by one."""
    return typer.Option(
        "--document", help=help, metavar="SOURCE", autocompletion=completion.documents
    )


def documents_argument(metavar: str) -> Any:
    return typer.Argument(
        help="Documents, as `store ls --documents` names them.",
        metavar=metavar,
        autocompletion=completion.documents,
    )


def with_settings(
    *wanted: str, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the flags of groups and of single settings, and --profile; `without` are
    settings of those groups that it doesn't take."""
    names = list(dict.fromkeys(name for one in (*wanted, "profile") for name in _names(one)))
    unknown = [name for name in without if name not in names]
    if unknown:
        raise ValueError(f"not in the groups: {', '.join(unknown)}")
    chosen = [name for name in names if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {name: given.pop(name) for name in chosen}
            for name in chosen:  # one that counts is 0 where it isn't given
                if DECLARED[name].count:
                    options[name] = options[name] or None
            command(**given, **{PARAMETER: options})

        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += _flags(chosen) if parameter.name == PARAMETER else [parameter]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        return run

    return decorate


def _names(wanted: str) -> Sequence[str]:
    if wanted in DECLARED:
        return [wanted]
    found = [setting.name for setting in DECLARED.values() if setting.group == wanted]
    if not found:
        raise ValueError(f"{wanted!r} is no setting and no group of settings")
    return found


def _flags(names: Sequence[str]) -> Iterator[inspect.Parameter]:
    for name in names:
        yield inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=option(DECLARED[name]),
        )


def option(setting: Declared) -> Any:
    """The annotation that makes the setting's flag."""
    first = setting.type.split(" ")[0]
    switch = first == "bool"
    off = setting.off or f"--no-{setting.flag.removeprefix('--')}"
    info = typer.Option(
        f"{setting.flag}/{off}" if switch else setting.flag,
        *([setting.short] if setting.short else []),
        help=f"{setting.help}; repeatable." if setting.repeat else f"{setting.help}.",
        show_default=not setting.count,
        metavar=setting.metavar or ("<str>" if setting.repeat else None),
        autocompletion=completion.of_setting(setting),
        # The settings' own variables are read by `load_settings`, which tells where they are from.
        allow_from_autoenv=False,
        count=setting.count,
    )
    if setting.count:
        return Annotated[int | None, info]
    if setting.repeat:
        return Annotated[list[str] | None, info]
    if switch:
        return Annotated[bool | None, info]
    plain = setting.kind not in (values.size, values.amount)  # those may have a unit
    return Annotated[(_NUMBERS.get(first, str) if plain else str) | None, info]
