"""Flags made from the settings: what a command names, it takes, and what is given gets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cbcli import flags
from cbcli.declared import DECLARED
from cbcli.settings import load_settings


def ran(
    args: Sequence[str], *wanted: str, without: Sequence[str] = ()
) -> tuple[Any, dict[str, object]]:
    """The result of a command with these settings, and the options it got."""
    app, got = typer.Typer(rich_markup_mode=None), {}

    @app.command()
    @flags.with_settings(*wanted, without=without)
    def command(
        first: Annotated[str, typer.Option("--first", help="First.")] = "",
        options: flags.Options = flags.NONE,
        last: Annotated[bool, typer.Option("--last", help="Last.")] = False,
    ) -> None:
        got.update(options)

    return CliRunner().invoke(app, list(args)), got


def test_a_group_is_taken_whole_at_the_place_of_its_parameter() -> None:
    result, _ = ran(["--help"], flags.SAMPLING, "model")
    shown = [line.split()[0] for line in result.output.splitlines() if line.startswith("  -")]
    wanted = [
        s.short + "," if s.short else s.flag for s in DECLARED.values() if s.group == flags.SAMPLING
    ]
    assert shown[: len(wanted) + 3] == ["--first", *wanted, "--model", "--last"]


def test_what_is_given_reaches_the_settings_and_nothing_else_does() -> None:
    args = [
        *("-r", "0.3,0.2", "--check-layer", "1", "--check-layer", "4", "--no-save"),
        *("--stop", "a", "--limit", "20GB", "--any-context", "-n", "7"),
    ]
    result, got = ran(args, flags.BLEND, flags.SAMPLING, "limit")
    assert result.exit_code == 0, result.output
    given = {name: value for name, value in got.items() if value not in (None, [])}
    assert given == {
        "ratio": "0.3,0.2",
        "check_layers": ["1", "4"],
        "save": False,
        "stop": ["a"],
        "limit": "20GB",
        "strict_context": False,
        "max_tokens": 7,
    }
    settings = load_settings(got, env={})
    assert settings.check_layers == (1, 4)
    assert settings.limit == 20_000_000_000
    from_flags = {name for name in DECLARED if settings.origin(name).kind == "flag"}
    assert from_flags == set(given)


def test_a_command_can_leave_settings_of_a_group_out() -> None:
    result, got = ran([], flags.BLEND, without=("loader", "mode"))
    assert result.exit_code == 0
    assert "ratio" in got
    assert {"loader", "mode"}.isdisjoint(got)
    result, _ = ran(["--loader", "sync"], flags.BLEND, without=("loader",))
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("wanted", "without"), [(("BLENDING",), ()), (("ration",), ()), ((flags.BLEND,), ("model",))]
)
def test_wrong_names_of_groups_and_settings_are_refused(
    wanted: tuple[str, ...], without: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=r"no setting|not in the groups"):
        flags.with_settings(*wanted, without=without)


def test_every_group_is_the_group_of_some_setting() -> None:
    declared = {setting.group for setting in DECLARED.values()} - {""}
    named = {value for name, value in vars(flags).items() if name.isupper() and value == name}
    assert declared == named
