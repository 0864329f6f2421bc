"""Every failure is one line and the exit code that fits; a bug is called a bug."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from cache_store.errors import (
    CacheblendError,
    IntegrityError,
    NotFoundError,
    StoreFullError,
    UsageError,
)
from cbcli import main
from cbcli.errors import Wanted, describe
from tests.cbcli.terminal import run


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `cacheblend ask` fail with an error."""
    app = typer.Typer()
    fails: list[BaseException] = []

    @app.command()
    def ask(json: bool = False, verbose: int = typer.Option(0, "-v", count=True)) -> None:
        raise fails[0]

    module = type(sys)("tests.cbcli.failing_command")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main.COMMANDS, "ask", (module.__name__, "Fail."))
    return fails.append


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (UsageError("bad flag", "use another"), "usage", 2),
        (StoreFullError("too big", "use another"), "store_full", 2),
        (NotFoundError("no such chunk", "use another"), "not_found", 3),
        (IntegrityError("damaged", "use another"), "integrity", 4),
        (CacheblendError("broke", "use another"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (typer.Abort(), "interrupted", 130),
        (MemoryError(), "failed", 1),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "failed", 1),
        (PermissionError(errno.EACCES, "Permission denied", b"/x/y"), "failed", 1),
        (TypeError("unsupported operand"), "internal", 1),
        (AssertionError(), "internal", 1),
        (ModuleNotFoundError("x", name="cbcli.gone"), "internal", 1),
        (ModuleNotFoundError("x", name="bm25s.core"), "failed", 1),
    ],
)
def test_exit_codes_and_kinds(
    error: BaseException, kind: str, code: int, failing: Callable[[BaseException], None]
) -> None:
    failing(error)
    result = run("ask", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    told = json.loads(line)["error"]
    assert set(told) == {"kind", "message", "hint"}
    assert told["kind"] == kind
    plain = run("ask")
    assert plain.exit_code == code
    assert len(plain.stderr.splitlines()) == 1
    assert plain.stderr.startswith(f"error: {told['message']}")
    assert "Traceback" not in plain.stderr


def test_a_full_disk_and_a_forbidden_path_are_named_with_advice() -> None:
    full = describe(OSError(errno.ENOSPC, "No space left on device", "/x/y"))
    assert full.message == "/x/y: No space left on device"
    assert "models_dir" in full.hint
    assert "permissions" in describe(PermissionError(errno.EACCES, "no", "/x")).hint


def test_a_bug_tells_its_type_and_place(failing: Callable[[BaseException], None]) -> None:
    failing(ZeroDivisionError("by zero"))
    told = run("ask").stderr
    assert "ZeroDivisionError in " in told
    assert "test_errors.py:" in told
    assert "bug" in told


@pytest.mark.parametrize("how", ["-vv", "variable"])
def test_tracebacks_are_for_those_who_ask(
    how: str, failing: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(NotFoundError("no such chunk"))
    assert "Traceback" not in run("ask", "-v").stderr
    if how == "variable":
        monkeypatch.setenv("CACHEBLEND_DEBUG", "1")
        result = run("ask", "--json")
    else:
        result = run("ask", how)
    assert "Traceback" in result.stderr
    assert "no such chunk" in result.stderr.splitlines()[-1]
    assert result.exit_code == 3


def test_out_of_memory_of_torch_is_recognised_without_importing_it() -> None:
    import torch

    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allo"),
    ):
        assert describe(error).message == "out of memory"
    assert describe(RuntimeError("shapes do not match")).kind == "internal"


def test_a_message_cannot_drive_the_terminal(failing: Callable[[BaseException], None]) -> None:
    failing(NotFoundError("no chunk \x1b[31m\nerror: all is well", "see \x9b1m"))
    (line,) = run("ask").stderr.splitlines()
    assert not {"\x1b", "\x9b"} & set(line)


def test_what_is_wanted_is_read_up_to_the_double_dash() -> None:
    assert Wanted.of(["ask", "--json"], {}) == Wanted(json=True)
    assert Wanted.of(["ask", "--", "--json", "-vv"], {}) == Wanted()
    assert Wanted.of(["ask", "-v", "-v"], {}).debug
    assert Wanted.of(["ask", "--verbose", "-v"], {}).debug
    assert Wanted.of(["ask", "-qvv"], {}).debug
    assert not Wanted.of(["ask", "-v", "very-vivid"], {}).debug
    assert Wanted.of([], {"CACHEBLEND_DEBUG": "1"}).debug
    assert not Wanted.of([], {"CACHEBLEND_DEBUG": "0"}).debug


def test_a_stream_that_cannot_hold_a_character_gets_it_spelt_out() -> None:
    code = "from cbcli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "models", "show", "modèle-東"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 3
    assert b"no model 'mod\\xe8le-\\u6771'" in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    code = (
        "from cbcli.main import main; import sys; sys.argv = ['cacheblend', *sys.argv[1:]]; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "config", "show"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
