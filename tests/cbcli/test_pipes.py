"""A reader that goes away and Ctrl-C end every command quietly, with their exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cbcli.command import Group
from cbcli.errors import EXIT_CODES, EXIT_MEANINGS, ExitCode
from cbcli.main import app as root
from tests.cbcli import schemas
from tests.cbcli.world import World, make_world

PAGE = Path(__file__).parents[2] / "docs/how-to/scripting.md"
# What commands that list something need besides.
WITH = {"ingest": ("docs", "--dry-run"), "search": ("Who keeps the log?",)}
LISTS = [
    words
    for words, command in schemas.commands().items()
    if any("--jsonl" in parameter.opts for parameter in command.params)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("world"), patch)
        made.json("ingest", "docs", "--collection", "sea")
        yield made


@pytest.fixture(autouse=True)
def _here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.root)
    for name, value in world.env("tiny").items():
        monkeypatch.setenv(name, value)


def ended(args: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """The exit code and stderr of a command whose stdout is a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    stderr = io.StringIO()
    with monkeypatch.context() as patch, os.fdopen(writing, "w", encoding="utf-8") as stdout:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as raised:
            main(args)
    return raised.value.code, stderr.getvalue()


def main(args: list[str]) -> None:
    command = typer.main.get_command(root)
    assert isinstance(command, Group)
    command.main(args)


@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",), ("-q",)], ids=" ".join)
@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_a_reader_that_goes_away_ends_a_list_quietly(
    words: tuple[str, ...], form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*words, *WITH.get(words[0], ()), *form]
    code, told = ended(args, monkeypatch)
    assert code == ExitCode.PIPE_CLOSED
    assert "rror" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_ctrl_c_is_a_line_and_its_exit_code(
    words: tuple[str, ...], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cbcli.output.print_list", interrupted)
    result = world(*words, *WITH.get(words[0], ()))
    assert (result.exit_code, result.stdout) == (ExitCode.INTERRUPTED, "")
    assert result.stderr.splitlines()[-1] == "error: interrupted"


def test_every_exit_code_has_a_meaning_and_is_documented() -> None:
    assert set(EXIT_MEANINGS) == set(ExitCode)
    assert {code for _, code in EXIT_CODES} <= set(ExitCode)
    rows = [f"| {code.value} | {meaning} |" for code, meaning in EXIT_MEANINGS.items()]
    page = PAGE.read_text("utf-8")
    assert "\n".join(rows) in page, "\n".join(rows)
