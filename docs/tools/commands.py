"""The help of every command, which cog puts into docs/reference/cli.md: `make reference`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from cbcli.main import app

WIDTH = 92


def help_pages() -> str:
    """Markdown: a heading and the help for each command, groups before what is in them."""
    root: Any = typer.main.get_command(app)
    return "".join(
        f"\n{'#' * (1 + len(path))} {' '.join(path)}\n\n```text\n{text}\n```\n"
        for path, text in _all(root)
    )


def _all(
    command: Any, parent: Any = None, name: str = "cacheblend"
) -> Iterator[tuple[list[str], str]]:
    context = command.make_context(
        name,
        [],
        parent=parent,
        resilient_parsing=True,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )
    path = context.command_path.split()
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield path, text
    if hasattr(command, "list_commands"):
        for inside in command.list_commands(context):
            yield from _all(command.get_command(context, inside), context, inside)
