"""`cacheblend serve` as far as it goes before vLLM is started."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from cache_store.errors import CacheblendError, UsageError
from cbcli.commands import serve
from engine.vllm.server import ServerPlan, arguments, bind, check_extra
from tests.cbcli.terminal import run


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)


def refused(result: Result) -> str:
    """The one line that says why."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_says_how_to_install_vllm() -> None:
    assert "pip install 'cacheblend[vllm]'" in refused(run("serve"))
    error = json.loads(refused(run("serve", "smollm2-135m", "--json")))["error"]
    assert error["kind"] == "usage"


def test_help_names_where_vllms_flags_go() -> None:
    result = run("serve", "--help")
    assert result.exit_code == 0
    assert "are vLLM's" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (["--kv-transfer-config", "{}"], "KV connector"),
        (["--kv-transfer-config={}"], "KV connector"),
        (["--kv_transfer_config.kv_connector=x"], "KV connector"),
        (["--model", "other"], "name the model first"),
        (["--worker-cls", "x.Y"], "worker"),
        (["--headless"], "without an API"),
    ],
)
@pytest.mark.parametrize("behind", [[], ["--"]])
def test_refuses_flags_that_it_sets_itself(flag: list[str], why: str, behind: list[str]) -> None:
    assert why in refused(run("serve", "smollm2-135m", *behind, *flag))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--ratio", "auto"], "not for a server"),
        (["--ratio", "1.5"], "--ratio"),
        (["--policy", "explicit"], "explicit"),
        (["--port", "70000"], "--port"),
        (["--ratio", "0.1", "--threshold", "0.5"], "exclude each other"),
    ],
)
def test_refuses_settings_that_a_server_cannot_honour(flags: list[str], why: str) -> None:
    assert why in refused(run("serve", *flags))


def test_flags_that_are_not_ours_go_through_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    def keep(extra: tuple[str, ...]) -> None:
        seen.append(extra)
        raise UsageError("enough")

    monkeypatch.setattr("engine.vllm.server.check_extra", keep)
    run("serve", "m", "--tensor-parallel-size", "2", "--ratio", "0.1", "--enforce-eager")
    run("serve", "--tensor-parallel-size", "2")
    run("serve", "m", "--", "--seed", "3", "--host", "x")
    assert seen == [
        ("--tensor-parallel-size", "2", "--enforce-eager"),
        ("--tensor-parallel-size", "2"),
        ("--seed", "3", "--host", "x"),
    ]


def plan(**changes: Any) -> ServerPlan:
    given = {
        "blueprint": SimpleNamespace(path=Path("/models/m"), name="m", dtype="bf16"),
        "host": "127.0.0.1",
        "port": 8000,
        "connector": {"store": "/store"},
        "separator": " ",
        "template_date": "2024-07-26",
        **changes,
    }
    return ServerPlan(**given)


def test_what_the_user_gives_comes_after_what_is_set_for_them() -> None:
    line = arguments(plan(extra=("--served-model-name", "mine")))
    assert line[-2:] == ["--served-model-name", "mine"]
    assert line.index("--served-model-name") < len(line) - 2
    told = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert told["kv_connector_extra_config"] == {"store": "/store"}
    assert told["kv_load_failure_policy"] == "recompute"


def test_flags_of_vllms_own_are_no_conflict() -> None:
    check_extra(("--tensor-parallel-size", "2", "--max-model-len=4096", "--model-impl", "vllm"))


def test_a_port_in_use_is_told_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CacheblendError, match=f"port {port} of") as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint


def test_a_port_that_is_bound_is_kept_from_others() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(CacheblendError):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_host_that_is_none_is_told() -> None:
    with pytest.raises(UsageError, match=r"no-such-host\.invalid"):
        bind("no-such-host.invalid", 0)
