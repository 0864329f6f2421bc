"""Flags: those made from the settings, and the variable that every flag has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperOption
from typer.testing import CliRunner

from cbcli import flags
from cbcli.declared import DECLARED
from cbcli.main import app
from cbcli.settings import RESERVED, load_settings
from cbcli.variables import setting_of, variable_of, walk
from tests.cbcli.terminal import run


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
    assert shown[: len(wanted) + 3] == ["--first", *wanted, "--model", "--profile"]


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


# Variables.


def every_flag() -> list[tuple[tuple[str, ...], TyperOption]]:
    return [
        (path, option)
        for path, command in walk(typer.main.get_command(app))
        for option in command.params
        if path and isinstance(option, TyperOption) and not option.is_eager
    ]


def test_every_flag_of_every_command_has_a_variable_of_its_own() -> None:
    found = every_flag()
    variables: dict[str, tuple[str, ...]] = {}
    for path, option in found:
        variable = variable_of(path, option)
        name = setting_of(option)
        if name:
            assert variable == DECLARED[name].variable
            assert option.envvar is None  # it is read by the settings, which know its origin
            assert option.help == option_help(name)
            continue
        assert option.envvar == variable, (path, option.name)
        assert variable.startswith("CACHEBLEND_" + "_".join(path).upper()), variable
        assert variable not in variables, (path, variables[variable])
        variables[variable] = path
    taken = {s.variable for s in DECLARED.values()} | set(RESERVED)
    assert taken.isdisjoint(variables)
    # and the settings know them all, however many commands there are
    assert load_settings(env=dict.fromkeys(variables, "1")).top_k == 6
    assert len(variables) > 100


def option_help(name: str) -> str:
    setting = DECLARED[name]
    return f"{setting.help}; repeatable." if setting.repeat else f"{setting.help}."


def test_a_variable_is_as_good_as_its_flag(tmp_path: Path) -> None:
    def says(*args: str, **env: str) -> str:
        variables = {"CACHEBLEND_CONFIG": str(tmp_path / "none.toml"), **env}
        variables.setdefault("CACHEBLEND_STORE", str(tmp_path / "store"))
        (tmp_path / "none.toml").touch()
        result = run(*args, env=variables)
        return result.stdout + result.stderr

    assert '"kind": "not_found"' in says("store", "ls", CACHEBLEND_STORE_LS_JSON="1")
    assert "such order" in says("store", "ls", CACHEBLEND_STORE_LS_SORT="sze")
    assert "no such" not in says("store", "ls", "--sort", "size", CACHEBLEND_STORE_LS_SORT="sze")
    assert "--replace and --keep" in says(
        *("store", "import", "x"),
        CACHEBLEND_STORE_IMPORT_KEEP="yes",
        CACHEBLEND_STORE_IMPORT_REPLACE="1",
    )
    wrong = says("ingest", "x", CACHEBLEND_INGEST_DRYRUN="1")
    assert "did you mean CACHEBLEND_INGEST_DRY_RUN?" in wrong
    assert "did you mean CACHEBLEND_TOP_K?" in says("store", "ls", CACHEBLEND_TOPK="3")
    wrong = says("store", "ls", CACHEBLEND_STORE_LS_LIMIT="many")
    assert "'--limit'" in wrong
    assert "(CACHEBLEND_STORE_LS_LIMIT is set; see" in wrong
    assert "CACHEBLEND_STORE_LS_NAME" in says("store", "ls", "--help")
