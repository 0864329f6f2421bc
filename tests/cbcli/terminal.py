"""Streams that say they are a terminal, and a way to run the command in this process."""

from __future__ import annotations

import io

from typer.testing import CliRunner, Result

from cbcli.main import app


class Terminal(io.StringIO):
    """Text written to a terminal."""

    def isatty(self) -> bool:
        return True


def run(*args: str, input: str | None = None, env: dict[str, str] | None = None) -> Result:
    """The result of `cacheblend ARGS`: exit code, stdout and stderr."""
    return CliRunner().invoke(app, list(args), input=input, env=env)
