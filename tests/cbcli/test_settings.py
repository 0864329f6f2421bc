"""Settings: the stronger layer wins, every value knows its origin, nothing unknown passes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import UsageError
from cbcli.commands.config import template
from cbcli.settings import (
    DECLARED,
    POLICIES,
    RESERVED,
    Settings,
    load_settings,
    problems,
    project_file,
    user_file,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project folder below a home of its own; the user's file is `home/user.toml`."""
    (tmp_path / "work" / "deep").mkdir(parents=True)
    return tmp_path


def load(home: Path, flags: dict[str, object] | None = None, **env: str) -> Settings:
    variables = {"CACHEBLEND_HOME": str(home / "data"), **env}
    if (home / "user.toml").exists():
        variables["CACHEBLEND_CONFIG"] = str(home / "user.toml")
    return load_settings(flags, env=variables, cwd=home / "work" / "deep")


def refused(home: Path, flags: dict[str, object] | None = None, **env: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(home, flags, **env)
    return caught.value


def test_defaults(home: Path) -> None:
    settings = load(home)
    assert settings.model == "smollm2-135m"
    assert settings.store == home / "data" / "store"
    assert settings.models_dir == home / "data" / "models"
    assert settings.ratio == (Decimal("0.16"),)
    assert settings.check_layers == (1,)
    assert settings.separator == "\n\n"
    assert (settings.chunk_tokens, settings.top_k, settings.min_tokens) == (512, 6, 256)
    assert settings.threads is settings.system is settings.limit is None
    assert settings.stop == ()
    assert settings.save is True
    assert {settings.origin(name).kind for name in DECLARED} == {"default"}


def test_each_layer_is_stronger_than_the_one_below(home: Path) -> None:
    assert load(home).top_k == 6
    (home / "user.toml").write_text("top_k = 2\nseed = 2\nmin_tokens = 2\nmax_tokens = 2\n")
    (home / "work" / "cacheblend.toml").write_text("top_k = 3\nseed = 3\nmin_tokens = 3\n")
    settings = load(home, {"top_k": 5, "seed": None}, CACHEBLEND_TOP_K="4", CACHEBLEND_SEED="4")
    found = {
        name: (getattr(settings, name), str(settings.origin(name)))
        for name in ("top_k", "seed", "min_tokens", "max_tokens", "overlap")
    }
    assert found == {
        "top_k": (5, "flag --top-k"),
        "seed": (4, "environment CACHEBLEND_SEED"),
        "min_tokens": (3, f"project {home / 'work' / 'cacheblend.toml'}"),
        "max_tokens": (2, f"user {home / 'user.toml'}"),
        "overlap": (0, "default"),
    }


def test_a_flag_that_is_not_given_is_not_a_value(home: Path) -> None:
    settings = load(home, {"stop": [], "check_layers": [], "save": None}, CACHEBLEND_SAVE="no")
    assert settings.save is False
    assert settings.check_layers == (1,)


def test_the_project_file_is_the_nearest_up_to_the_repository(home: Path) -> None:
    deep = home / "work" / "deep"
    (home / "cacheblend.toml").write_text("")
    assert project_file(deep) == home / "cacheblend.toml"
    (home / "work" / ".git").mkdir()
    assert project_file(deep) is None
    (home / "work" / "cacheblend.toml").write_text("")
    assert project_file(deep) == home / "work" / "cacheblend.toml"
    (deep / "cacheblend.toml").write_text("")
    assert project_file(deep) == deep / "cacheblend.toml"


def test_the_project_file_is_not_looked_for_above_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home / "work"))
    (home / "cacheblend.toml").write_text("")
    assert project_file(home / "work" / "deep") is None


def test_paths_are_relative_to_their_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    (home / "work" / "cacheblend.toml").write_text(
        'store = "kv"\nmodels_dir = "~/models"\nmodel = "./my-model"\n'
    )
    settings = load(home)
    assert settings.store == home / "work" / "kv"
    assert settings.models_dir == home / "models"
    assert settings.model == str(home / "work" / "my-model")
    assert load(home, {"store": Path("here")}).store == home / "work" / "deep" / "here"
    assert load(home, CACHEBLEND_MODEL="../x").model == str(home / "work" / "deep" / ".." / "x")
    assert load(home, {"model": "owner/name"}).model == "owner/name"


def test_the_users_file_is_where_the_platform_says_or_the_variable(tmp_path: Path) -> None:
    assert user_file({}).name == "config.toml"
    assert "cacheblend" in user_file({}).parts
    given = user_file({"CACHEBLEND_CONFIG": str(tmp_path / "mine.toml")})
    assert given == tmp_path / "mine.toml"
    with pytest.raises(UsageError, match=r"mine\.toml"):
        load_settings(env={"CACHEBLEND_CONFIG": str(given)}, cwd=tmp_path)


def test_an_unknown_key_names_the_nearest(home: Path) -> None:
    (home / "work" / "cacheblend.toml").write_text("topk = 3\n")
    error = refused(home)
    assert "unknown setting 'topk'" in error.message
    assert str(home / "work" / "cacheblend.toml") in error.message
    assert error.hint == "did you mean top_k?"
    (home / "work" / "cacheblend.toml").write_text("[blend]\nratio = 0.1\n")
    assert "unknown setting 'blend'" in refused(home).message


def test_an_unknown_variable_names_the_nearest(home: Path) -> None:
    error = refused(home, CACHEBLEND_RATOI="0.2")
    assert "CACHEBLEND_RATOI" in error.message
    assert error.hint == "did you mean CACHEBLEND_RATIO?"
    load(
        home,
        **dict.fromkeys(
            ["CACHEBLEND_DEBUG", "CACHEBLEND_NATIVE", "CACHEBLENDER", "_CACHEBLEND_COMPLETE"], "1"
        ),
    )
    assert "CACHEBLEND_DEBUG" in RESERVED


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ratio", "1.01", "0 to 1"),
        ("ratio", "-0.1", "0 to 1"),
        ("ratio", "lots", "0 to 1"),
        ("ratio", "nan", "0 to 1"),
        ("ratio", "0.1,0.2", "none greater than the one before"),
        ("ratio", "", "0 to 1"),
        ("ratio", "0.1,", "0 to 1"),
        ("check_layers", "0", "rounding noise"),
        ("check_layers", "8,1", "rising order"),
        ("check_layers", "1,1", "rising order"),
        ("check_layers", "one", "rising order"),
        ("top_k", "0", "from 1"),
        ("top_k", "3.5", "whole number"),
        ("top_k", "three", "whole number"),
        ("threads", "-1", "from 1"),
        ("temperature", "-1", "from 0"),
        ("temperature", "inf", "number"),
        ("top_p", "0", "above 0"),
        ("top_p", "1.1", "up to 1"),
        ("device", "gpu", "cuda:N"),
        ("device", "cuda:x", "cuda:N"),
        ("dtype", "int8", "bf16"),
        ("mode", "blended", "blend, reuse"),
        ("policy", "best", "value, key"),
        ("order", "random", "shuffle"),
        ("offline", "maybe", "true or false"),
        ("limit", "20 parsecs", "size such as 20GB"),
        ("limit", "0", "size such as 20GB"),
        ("template_date", "2024-02-30", "YYYY-MM-DD"),
        ("chunk_tokens", "1", "from 8"),
        ("model", " ", "name or folder"),
    ],
)
def test_a_wrong_value_is_refused_naming_flag_value_and_what_is_expected(
    name: str, value: str, expected: str, home: Path
) -> None:
    error = refused(home, {name: value})
    assert DECLARED[name].flag in error.message
    assert repr(value) in error.message
    assert expected in error.hint


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('top_k = "six"', "top_k is 'six'"),
        ("top_k = true", "top_k is True"),
        ("offline = 1", "offline is 1"),
        ("ratio = 1.5", "ratio is 1.5"),
        ("separator = 3", "separator is 3"),
        ("store = []", "store is []"),
        ("stop = [1]", "stop is [1]"),
        ("ratio = [0.1, true]", "ratio is"),
        ("ratio = []", "ratio is []"),
    ],
)
def test_a_wrong_value_in_a_file_names_file_key_and_value(line: str, said: str, home: Path) -> None:
    path = home / "work" / "cacheblend.toml"
    path.write_text(line)
    error = refused(home)
    assert error.message.startswith(f"{path}: {said}")
    assert error.hint.startswith("expected ")


@pytest.mark.parametrize("content", [b"top_k = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_named(content: bytes, home: Path) -> None:
    path = home / "work" / "cacheblend.toml"
    path.write_bytes(content)
    assert str(path) in refused(home).message


def test_ratios_are_exact_however_they_are_given(home: Path) -> None:
    (home / "work" / "cacheblend.toml").write_text("ratio = [0.3, 0.1]\ncheck_layers = [1, 8]\n")
    tenth = Decimal("0.1")
    assert load(home).ratio == (Decimal("0.3"), tenth)
    assert load(home).check_layers == (1, 8)
    assert load(home, {"ratio": "0.1"}).ratio == (tenth,)
    assert load(home, {"ratio": 0.1}).ratio == (tenth,)
    assert load(home, {"ratio": ["0.3", "0.1"]}).ratio == (Decimal("0.3"), tenth)
    assert load(home, CACHEBLEND_RATIO="0.3, 0.1").ratio == (Decimal("0.3"), tenth)
    assert load(home, {"ratio": "0"}).ratio == (Decimal(0),)
    assert load(home, {"ratio": "1"}).ratio == (Decimal(1),)


@given(st.decimals(0, 1, allow_nan=False, places=6))
def test_any_ratio_keeps_its_value(ratio: Decimal) -> None:
    settings = load_settings({"ratio": str(ratio)}, env={}, cwd=Path("/"))
    assert settings.ratio == (ratio,)


def test_text_from_a_shell_may_spell_its_newlines(home: Path) -> None:
    assert load(home, {"separator": r"\n---\t\\n"}).separator == "\n---\t\\n"
    assert load(home, CACHEBLEND_SEPARATOR=r"\n").separator == "\n"
    (home / "work" / "cacheblend.toml").write_text(r"separator = '\n'")
    assert load(home).separator == r"\n"
    assert load(home, CACHEBLEND_STOP=r"\nUser:").stop == ("\nUser:",)
    assert load(home).text_separator == " # # "
    assert load(home, {"text_separator": r"\n#\n"}).text_separator == "\n#\n"
    assert "at least one character" in refused(home, {"text_separator": ""}).hint


def test_devices_come_as_a_list_or_with_commas(home: Path) -> None:
    assert load(home).devices == ()
    assert load(home, CACHEBLEND_DEVICES="cuda:0, cuda:1").devices == ("cuda:0", "cuda:1")
    (home / "work" / "cacheblend.toml").write_text('devices = ["cpu", "cpu"]')
    assert load(home).devices == ("cpu", "cpu")
    assert load(home, {"devices": "mps"}).devices == ("mps",)
    for wrong in ("auto", "cpu,", "cpu,warp", "auto,cpu"):
        error = refused(home, {"devices": wrong})
        assert error.message == f"--devices is {wrong!r}"
        assert error.hint == "expected devices such as cuda:0,cuda:1"


def test_an_empty_variable_is_unset_but_for_texts(home: Path) -> None:
    settings = load(home, CACHEBLEND_TOP_K="", CACHEBLEND_SYSTEM="", CACHEBLEND_SEPARATOR="")
    assert settings.top_k == 6
    assert settings.origin("top_k").kind == "default"
    assert (settings.system, settings.separator) == ("", "")


def test_an_overlap_must_be_smaller_than_the_chunk(home: Path) -> None:
    error = refused(home, {"overlap": 64}, CACHEBLEND_CHUNK_TOKENS="64")
    assert "--overlap" in error.message
    assert "CACHEBLEND_CHUNK_TOKENS" in error.message


def test_dates_and_sizes_are_read(home: Path) -> None:
    (home / "work" / "cacheblend.toml").write_text('template_date = 2025-03-01\nlimit = "20GB"\n')
    settings = load(home)
    assert settings.template_date == "2025-03-01"
    assert settings.limit == 20_000_000_000
    assert load(home, {"limit": "500MiB"}).limit == 500 * 2**20


def test_all_problems_of_a_file_are_found(home: Path) -> None:
    path = home / "bad.toml"
    path.write_text("topk = 1\nratio = 7\nseed = 1\n")
    assert len(list(problems(path))) == 2


def test_the_template_is_valid_with_and_without_its_comment_signs(home: Path) -> None:
    path = home / "work" / "cacheblend.toml"
    path.write_text(template())
    assert load(home) == load(home, {})
    assert {load(home).origin(name).kind for name in DECLARED} == {"default"}
    lines = [
        line.removeprefix("# ")
        for line in template().splitlines()
        if " = " in line or line.startswith("# [")
    ]
    path.write_text("\n".join(lines))
    assert set(tomli.loads(path.read_text())) == set(DECLARED)
    settings = load(home, CACHEBLEND_TRUST=str(home))
    unset = {"threads", "system", "limit", "target_kl", "threshold", "transfer", "trace_layers"}
    unset |= {"remote", "min_score", "max_size", "jobs", "trust"}
    assert str(settings.origin("ratio")) == f"project {path} [profile.fast]"
    unset |= {"profile", "ratio"}
    for name in DECLARED:
        same = getattr(settings, name) == getattr(load_settings(env={}, cwd=Path("/")), name)
        assert same or name in {*unset, "store", "models_dir"}, name


def test_policies_are_those_of_the_engine() -> None:
    from engine.policies import POLICY_NAMES

    assert POLICIES == POLICY_NAMES


def test_every_setting_is_described() -> None:
    for setting in DECLARED.values():
        assert setting.help
        assert setting.flag.startswith("--")
        assert (setting.default is None) == bool(setting.example)
