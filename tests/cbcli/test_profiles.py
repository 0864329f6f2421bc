"""Profiles: keys that count above their file's own, where one is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_store.errors import UsageError
from cbcli.session import blend_options
from cbcli.settings import Settings, load_settings, problems
from tests.cbcli.terminal import run

USER = """
top_k = 2
seed = 2
[profile.fast]
top_k = 3
seed = 3
max_tokens = 3
"""
PROJECT = """
top_k = 4
store = "kv"
[profile.fast]
seed = 5
models_dir = "models"
[profile.good]
ratio = 0.5
[profile]
use = "good"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "user.toml").write_text(USER)
    (tmp_path / "cacheblend.toml").write_text(PROJECT)
    return tmp_path


def load(home: Path, flags: dict[str, object] | None = None, **env: str) -> Settings:
    return load_settings(flags, env={"CACHEBLEND_CONFIG": str(home / "user.toml"), **env}, cwd=home)


def told(settings: Settings, *names: str) -> dict[str, tuple[object, str]]:
    return {name: (getattr(settings, name), str(settings.origin(name))) for name in names}


def test_a_profiles_keys_are_above_its_files_own_and_below_all_stronger_layers(home: Path) -> None:
    user, project = home / "user.toml", home / "cacheblend.toml"
    found = load(home, {"profile": "fast"}, CACHEBLEND_PORT="1")
    assert told(found, "top_k", "seed", "max_tokens", "port", "profile") == {
        "top_k": (4, f"project {project}"),
        "seed": (5, f"project {project} [profile.fast]"),
        "max_tokens": (3, f"user {user} [profile.fast]"),
        "port": (1, "environment CACHEBLEND_PORT"),
        "profile": ("fast", "flag --profile"),
    }
    assert found.models_dir == home / "models"
    assert load(home, {"profile": "fast", "seed": 8}, CACHEBLEND_SEED="7").seed == 8
    assert load(home, {"profile": "fast"}, CACHEBLEND_SEED="7").seed == 7


def test_flag_variable_and_files_choose_one_in_that_order(home: Path) -> None:
    (home / "user.toml").write_text('profile = "fast"\n')
    assert load(home).profile == "good"
    assert str(load(home).ratio[0]) == "0.5"
    assert load(home, CACHEBLEND_PROFILE="fast").seed == 5
    assert load(home, {"profile": "good"}, CACHEBLEND_PROFILE="fast").seed == 0
    none = load(home, {"profile": ""}, CACHEBLEND_PROFILE="fast")
    assert (none.profile, none.seed) == (None, 0)
    (home / "cacheblend.toml").write_text("[profile.fast]\nseed = 9\n")
    assert load(home).seed == 9  # chosen by the user's file


def test_an_unknown_profile_is_named_with_the_nearest(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(home, {"profile": "fsat"})
    assert str(caught.value.message) == "flag --profile: no profile 'fsat'"
    assert caught.value.hint == "did you mean fast?"
    with pytest.raises(UsageError, match="environment CACHEBLEND_PROFILE: no profile 'x'"):
        load(home, CACHEBLEND_PROFILE="x")
    (home / "user.toml").write_text('profile = "gone"\n')
    assert load(home).profile == "good"  # nobody follows the weaker choice


def test_a_profiles_ratio_is_above_its_files_threshold(home: Path) -> None:
    (home / "cacheblend.toml").write_text("threshold = 0.3\n[profile.r]\nratio = 0.1\n")
    assert blend_options(load(home, {"profile": "r"})).threshold is None
    assert str(blend_options(load(home)).threshold) == "0.3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profile.a]\nrato = 1\n", "[profile.a]: unknown setting 'rato'"),
        ("[profile.a]\nratio = 7\n", "[profile.a]: ratio is 7"),
        ("[profile]\nfast = 3\n", "'fast' is no table of a profile"),
        ('[profile.a]\nprofile = "b"\n', "can't choose another"),
        ('[profile."a b"]\n', "no name of a profile"),
        ("profile = 3\n", "profile is 3"),
    ],
)
def test_what_is_wrong_with_a_profile_is_told(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cacheblend.toml"
    path.write_text(text)
    (found,) = problems(path)
    assert said in found.message


def test_validate_checks_every_profile_and_show_shows_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    env = {"CACHEBLEND_CONFIG": str(home / "user.toml")}
    shown = json.loads(run("config", "show", "--profile", "fast", "--json", env=env).stdout)
    assert shown["seed"]["where"] == f"{home / 'cacheblend.toml'} [profile.fast]"
    assert run("config", "validate", env=env).exit_code == 0
    (home / "cacheblend.toml").write_text("[profile.a]\nchunk_tokens = 9\noverlap = 9\n")
    wrong = run("config", "validate", env=env)
    assert (wrong.exit_code, "overlap is 9" in wrong.stderr) == (2, True)
