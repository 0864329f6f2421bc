"""`cacheblend config`, as its user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbcli.settings import DECLARED
from tests.cbcli.terminal import run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_file_once(here: Path) -> None:
    result = run("config", "init")
    path = here / "cacheblend.toml"
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    text = path.read_text()
    for name in DECLARED:
        assert name == "profile" or f"# {name} = " in text
    path.write_text("top_k = 3\n")
    again = run("config", "init")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert path.read_text() == "top_k = 3\n"
    assert run("config", "init", "--force", "--json").exit_code == 0
    assert path.read_text() == text


def test_init_user_writes_the_users_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_CONFIG", str(here / "new" / "user.toml"))
    assert run("config", "init", "--user").exit_code == 0
    assert (here / "new" / "user.toml").is_file()


def test_show_tells_value_and_origin(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "cacheblend.toml").write_text('ratio = [0.3, 0.1]\ncheck_layers = [1, 8]\nstop = "x"')
    monkeypatch.setenv("CACHEBLEND_TOP_K", "3")
    shown = {
        line.split()[0]: line.split()[1:] for line in run("config", "show").stdout.splitlines()
    }
    assert shown["top_k"] == ["3", "environment", "CACHEBLEND_TOP_K"]
    assert shown["ratio"] == ["[0.3,", "0.1]", "project", str(here / "cacheblend.toml")]
    assert shown["seed"] == ["0", "default"]
    assert shown["system"] == ["unset", "default"]
    assert shown["store"][1:] == ["default", "in", "CACHEBLEND_HOME"]
    told = json.loads(run("config", "show", "--json").stdout)
    assert set(told) == set(DECLARED)
    assert told["ratio"]["value"] == [0.3, 0.1]
    assert told["stop"]["value"] == ["x"]
    assert told["top_k"] == {"value": 3, "origin": "environment", "where": "CACHEBLEND_TOP_K"}
    assert told["limit"]["value"] is None
    assert set(json.loads(run("config", "show", "top_k", "seed", "--json").stdout)) == {
        "top_k",
        "seed",
    }
    assert run("config", "show", "seed").stdout.splitlines()[1:] == ["seed     0      default"]
    wrong = run("config", "show", "topk")
    assert (wrong.exit_code, "did you mean top_k?" in wrong.stderr) == (2, True)


def test_path_tells_which_files_are_read(here: Path) -> None:
    before = json.loads(run("config", "path", "--json").stdout)
    assert before["project"] is None
    assert before["user_exists"] is False
    assert "no cacheblend.toml here or above" in run("config", "path").stdout
    (here / "cacheblend.toml").write_text("")
    assert str(here / "cacheblend.toml") in run("config", "path").stdout


def test_validate_tells_all_problems_and_exits_2(here: Path) -> None:
    assert run("config", "validate").exit_code == 0
    (here / "cacheblend.toml").write_text("topk = 1\nratio = 7\n")
    result = run("config", "validate")
    assert result.exit_code == 2
    assert "topk" in result.stdout
    assert "ratio is 7" in result.stdout
    told = run("config", "validate", "--json")
    assert told.exit_code == 2
    assert len(json.loads(told.stdout)["problems"]) == 2
    (here / "good.toml").write_text("top_k = 1\n")
    assert run("config", "validate", "good.toml").exit_code == 0
    assert run("config", "validate", "missing.toml").exit_code == 2


def test_a_bad_setting_stops_every_command_that_reads_them(here: Path) -> None:
    (here / "cacheblend.toml").write_text("topk = 1\n")
    for args in (["config", "show"], ["models", "ls"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "did you mean top_k?" in result.stderr
