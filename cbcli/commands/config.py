"""`cacheblend config`: the settings, where each comes from, and the files that hold them."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from cache_store.errors import UsageError
from cbcli import flags
from cbcli.command import Group, Json, Quiet, Verbose, app_options, examples, nearest
from cbcli.errors import ExitCode
from cbcli.output import Output
from cbcli.settings import (
    DECLARED,
    PROJECT_FILE,
    load_settings,
    problems,
    project_file,
    settings_files,
    user_file,
)
from cbcli.settings_text import as_toml, plain, template

app = typer.Typer(
    cls=Group,
    **app_options(),
    help="Settings, and where the value of each comes from.",
    epilog=examples("cacheblend config show", "cacheblend config init"),
)


@app.command(epilog=examples("cacheblend config init", "cacheblend config init --user"))
def init(
    user: Annotated[bool, typer.Option("--user", help="Write the user's file.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Write a settings file to start from.

    Every setting is in it, commented out. It goes to ./cacheblend.toml, for this folder and those
    below, or to the user's file."""
    out = Output(json=json, quiet=quiet, verbose=verbose)
    path = user_file() if user else Path.cwd() / PROJECT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise UsageError(f"{path} is there already", "edit it, or add --force") from None
    if json:
        out.data({"path": str(path)})
    else:
        out.line(str(path))


@app.command(epilog=examples("cacheblend config show", "cacheblend config show top_k ratio"))
@flags.with_settings("pager")
def show(
    names: Annotated[
        list[str] | None, typer.Argument(help="Settings; all of them, without one.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show settings, all or some: the value of each and where that comes from."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    shown = tuple(names or DECLARED)
    for name in shown:
        if name not in DECLARED:
            near = nearest(name, tuple(DECLARED))
            hint = f"did you mean {near}?" if near else "`cacheblend config show` has all of them"
            raise UsageError(f"no setting {name!r}", hint)
    if json:
        out.data(
            {
                name: {
                    "value": plain(name, getattr(settings, name)),
                    "origin": settings.origin(name).kind,
                    "where": settings.origin(name).where,
                }
                for name in shown
            }
        )
        return
    rows = [
        (name, as_toml(plain(name, getattr(settings, name))) or "unset", settings.origin(name))
        for name in shown
    ]
    out.table(["setting", "value", "origin"], rows)


@app.command(epilog=examples("cacheblend config path"))
def path(json: Json = False, quiet: Quiet = False, verbose: Verbose = 0) -> None:
    """Show which settings files are read, the stronger one first."""
    out = Output(json=json, quiet=quiet, verbose=verbose)
    project, user = project_file(), user_file()
    if json:
        out.data(
            {
                "project": str(project) if project else None,
                "user": str(user),
                "user_exists": user.is_file(),
            }
        )
        return
    missing = "" if user.is_file() else " (not there)"
    out.pairs(
        [("project", project or f"no {PROJECT_FILE} here or above"), ("user", f"{user}{missing}")]
    )


@app.command(epilog=examples("cacheblend config validate", "cacheblend config validate my.toml"))
def validate(
    file: Annotated[
        Path | None, typer.Argument(help="A settings file; those that are read, without one.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Check settings files, and all profiles in them.

    All that is wrong is told, with exit code 2. Without a file, the environment is checked too."""
    out = Output(json=json, quiet=quiet, verbose=verbose)
    files = [file.absolute()] if file else [f for f in (project_file(), user_file()) if f]
    files = [f for f in files if file or f.is_file()]
    found = [(f, problem) for f in files for problem in problems(f)]
    if json:
        wrong = [{"message": p.message, "hint": p.hint} for _, p in found]
        out.data({"files": [str(f) for f in files], "problems": wrong})
    else:
        for _, problem in found:
            out.line(f"{problem.message} ({problem.hint})" if problem.hint else problem.message)
    if found:
        raise typer.Exit(ExitCode.USAGE)
    if not file:
        load_settings()  # the environment, and what doesn't go together
        for profile in {name for one in settings_files() for name in one.profiles}:
            load_settings({"profile": profile})
    if not json:
        out.line("\n".join(f"{f}: good" for f in files) or "no settings files; all good")


@app.command(epilog=examples("cacheblend config schema > cacheblend.schema.json"))
def schema(json: Json = False, quiet: Quiet = False, verbose: Verbose = 0) -> None:
    """Print the JSON Schema of settings files, for editors."""
    from cbcli.settings_schema import settings_schema

    out = Output(json=json, quiet=quiet, verbose=verbose)
    if json:
        out.data(settings_schema())
    else:
        out.line(json_module.dumps(settings_schema(), ensure_ascii=False, indent=2))
