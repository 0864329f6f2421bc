"""The connector's settings: where each comes from, and that wrong ones are refused at once."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import NotFoundError, UsageError
from cache_store.store import ChunkStore
from cache_store.tiers.tiered import TieredStore
from cbcli.settings import DECLARED, load_settings
from engine.blueprint import Blueprint
from engine.options import BlendOptions
from engine.vllm.settings import (
    SETTINGS,
    ConnectorSettings,
    model_folder,
    open_blueprint,
    open_store,
    variable_of,
)
from tests.cbcli.world import add_model

HOME = {"CACHEBLEND_HOME": "/data"}


def of(given: dict[str, Any] | None = None, **env: str) -> ConnectorSettings:
    return ConnectorSettings.of(given or {}, {**HOME, **env})


def test_with_nothing_said_it_is_the_commands_own_store_and_ratio() -> None:
    settings = of()
    assert settings.store == Path("/data/store")
    assert settings.fingerprints == Path("/data/fingerprints.json")
    assert settings.blend == BlendOptions()
    assert settings.separator == " # # "
    assert settings.remote is None
    assert settings.trace is None
    assert not settings.read_only


def test_defaults_are_the_commands(tmp_path: Path) -> None:
    """A store that the command fills is what vLLM looks into, and blends as the command does."""
    theirs = load_settings(env={"CACHEBLEND_HOME": str(tmp_path)}, cwd=tmp_path)
    ours = ConnectorSettings.of({}, {"CACHEBLEND_HOME": str(tmp_path)})
    assert ours.store == theirs.store
    assert ours.separator == theirs.text_separator
    assert (ours.context, ours.kv_dtype) == (theirs.context, theirs.kv_dtype)
    for name in ("mode", "policy", "threshold", "check_layers", "min_tokens", "seed", "loader"):
        assert getattr(ours.blend, name) == getattr(theirs, name), name
    assert ours.blend.ratios == theirs.ratio


def test_what_is_given_is_over_the_environment_and_that_over_the_defaults() -> None:
    env = dict(CACHEBLEND_STORE="/s", CACHEBLEND_RATIO="0.3", CACHEBLEND_SAVE="false")
    assert of({}, **env).store == Path("/s")
    assert of({}, **env).blend.ratios == (Decimal("0.3"),)
    assert of({"ratio": 0.05, "store": "/t"}, **env).blend.ratios == (Decimal("0.05"),)
    assert of({"ratio": 0.05, "store": "/t"}, **env).store == Path("/t")
    assert of({"ratio": None}, **env).blend.ratios == (Decimal("0.3"),)
    assert not of({}, **env).save
    assert of({"save": True}, **env).save
    assert of({}, CACHEBLEND_STORE="").store == Path("/data/store")
    assert of({}, CACHEBLEND_SYSTEM="").system == ""
    assert of().system is None


def test_a_ratio_that_is_given_is_over_a_threshold_of_the_environment() -> None:
    env = dict(CACHEBLEND_THRESHOLD="0.5")
    assert of({}, **env).blend.threshold == Decimal("0.5")
    assert of({"ratio": 0.1}, **env).blend.threshold is None
    assert of({"threshold": "0.4"}, CACHEBLEND_RATIO="0.1").blend.threshold == Decimal("0.4")
    assert of({"threshold": "0.4"}, CACHEBLEND_RATIO="auto").blend.threshold == Decimal("0.4")
    with pytest.raises(UsageError, match="ratio and threshold exclude each other"):
        of({"ratio": 0.1, "threshold": 0.5})


def test_null_is_no_separator() -> None:
    assert of({"separator": None}).separator is None
    assert of({"separator": None}, CACHEBLEND_TEXT_SEPARATOR="##").separator is None
    assert of({}, CACHEBLEND_TEXT_SEPARATOR="##").separator == "##"
    assert of({}, CACHEBLEND_TEXT_SEPARATOR=r"\n\n").separator == "\n\n"
    assert of({"separator": r"\n"}).separator == r"\n"
    with pytest.raises(UsageError, match="separator is ''"):
        of({"separator": ""})


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        ({"rato": 0.1}, "unknown setting 'rato'", "did you mean 'ratio'?"),
        ({"Store": "/x"}, "unknown setting 'Store'", "did you mean 'store'?"),
        ({"qqqqqqqq": 1}, "unknown setting", "docs/vllm.md"),
        ({"ratio": 2}, "ratio is 2", "from 0 to 1"),
        ({"ratio": float("nan")}, "ratio is nan", "from 0 to 1"),
        ({"ratio": True}, "ratio is True", "from 0 to 1"),
        ({"ratio": []}, "ratio is []", "from 0 to 1"),
        ({"ratio": [0.1, 0.2], "check_layers": [1, 2]}, "must not rise", ""),
        ({"check_layers": 0}, "check layer 0", ""),
        ({"policy": "best"}, "policy 'best' is unknown", "question"),
        ({"mode": 1}, "mode is 1", "blend"),
        ({"store": 3}, "store is 3", "a path"),
        ({"store": ""}, "store is ''", "a path"),
        ({"step_tokens": 0}, "step_tokens is 0", "from 1 on"),
        ({"step_tokens": "many"}, "step_tokens is 'many'", "from 1 on"),
        ({"save": "maybe"}, "save is 'maybe'", "true or false"),
        ({"memory_limit": "2 boxes"}, "memory_limit is '2 boxes'", "20GB"),
        ({"remote_timeout": 0}, "remote_timeout is 0", "above 0"),
        ({"remote": "http://x"}, "remote is 'http://x'", "redis://"),
        ({"trace": "all"}, "trace is 'all'", "basic, full"),
        ({"context": "all"}, "context is 'all'", "prefix"),
        ({"kv_dtype": "int2"}, "kv_dtype is 'int2'", "int4"),
        ({"template_date": "today"}, "template_date is 'today'", "YYYY-MM-DD"),
        ({"separator": 5}, "separator is 5", "text"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    given: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        of(given)
    assert says in refused.value.message
    assert hint in refused.value.hint
    assert "\n" not in refused.value.message


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match="CACHEBLEND_RATIO is 'lots'"):
        of({}, CACHEBLEND_RATIO="lots")


def test_a_remotes_password_is_not_shown() -> None:
    with pytest.raises(UsageError) as refused:
        of({"remote": "redis://me:geheim@host/x?y=1"})
    assert "geheim" not in refused.value.message + refused.value.hint


def test_every_variable_is_one_that_the_command_knows() -> None:
    """Else the command would refuse to run where it is set."""
    known = {setting.variable for setting in DECLARED.values()}
    assert {variable_of(s) for s in SETTINGS.values() if s.variable} <= known


def test_values_go_through_json() -> None:
    given = {
        **dict(store="/s", ratio=[0.3, 0.16], check_layers=[1, 8], memory_limit="2GB"),
        **dict(remote="redis://h:1/2", trace_layers=[1, 5], limit=10**9, audit=50),
    }
    settings = ConnectorSettings.of(json.loads(json.dumps(given)), {})
    assert settings.blend.check_layers == (1, 8)
    assert (settings.memory_limit, settings.limit) == (2 * 10**9, 10**9)
    assert settings.remote == "redis://h:1/2"
    assert (settings.trace_layers, settings.audit) == ((1, 5), 50)


# The store


def test_a_store_is_made_with_its_limit_and_read_only_ones_are_not(tmp_path: Path) -> None:
    given = {"store": str(tmp_path / "s"), "limit": "50MB"}
    with pytest.raises(NotFoundError, match="no store"):
        open_store(of({**given, "read_only": True}))
    with open_store(of(given)) as store:
        assert type(store) is ChunkStore
        assert store.limit == 50_000_000
        assert not store.read_only
    with open_store(of({**given, "read_only": True})) as store:
        assert store.read_only


def test_a_store_has_the_tiers_that_are_set(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    pytest.importorskip("obstore")
    given = {
        "store": str(tmp_path / "s"),
        "limit": "50MB",
        "remote": f"file://{tmp_path}/shared",
        "remote_timeout": 2.5,
        "memory_limit": "1MB",
    }
    with open_store(of(given)) as store:
        assert isinstance(store, TieredStore)
        assert store.memory is not None
        assert store.memory.limit == 1_000_000
        assert store.remote is not None
        assert store.remote.timeout == 2.5
    with open_store(of({**given, "remote": "none"})) as store:
        assert isinstance(store, TieredStore)
        assert store.remote is None


# The model


def test_vllm_finds_what_the_command_ingested(tmp_path: Path) -> None:
    """The same fingerprints, shape, type and context, by whatever path the model is named."""
    folder = add_model(tmp_path, "tiny")
    theirs = Blueprint.open(folder, device="cpu", dtype="fp32")
    settings = of({"fingerprints": str(tmp_path / "f.json")})
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, str(folder), tmp_path / "link", f"{folder}/../tiny"):
        ours = open_blueprint(settings, path, "fp32")
        assert ours.spec == theirs.spec
        assert ours.chunk_context == theirs.chunk_context
    assert open_blueprint(settings, folder, "bf16").spec != theirs.spec
    assert open_blueprint(of({"kv_dtype": "fp32"}), folder, "bf16").spec == theirs.spec


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_model(tmp_path, "tiny")
    settings = of({"fingerprints": str(tmp_path / "new" / "f.json")})
    first = open_blueprint(settings, folder, "fp32").spec
    monkeypatch.setattr("engine.fingerprint.blake3", None)  # nothing can be hashed any more

    def no_hash(*_: Any) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr("engine.fingerprint._fingerprint", lambda config, digests: list(digests))
    assert open_blueprint(settings, folder, "fp32").spec.model != first.model  # from the memo alone


def test_the_folder_of_a_model_can_be_given_and_must_be_there(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "tiny")
    settings = of({"model": str(folder), "name": "mine"})
    assert open_blueprint(settings, "org/other", "fp32").name == "mine"
    with pytest.raises(NotFoundError, match="org/not-here"):
        model_folder("org/not-here")
    with pytest.raises(NotFoundError, match="the folder of model"):
        model_folder("not a name/of/anything")
