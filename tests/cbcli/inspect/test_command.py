"""`cacheblend inspect` without a terminal: formats, files, and what is no trace."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from cbcli.commands.inspect import asked, wanted_format
from cbcli.inspect.run import Run
from cbcli.inspect.tables import as_json, csv_text
from engine.trace import keep, read, write
from engine.trace.record import Trace
from tests.cbcli.inspect.support import example
from tests.cbcli.terminal import Terminal, run


def kept(number: int) -> Trace:
    """A run as the state folder names them."""
    name = f"2026010{number}T120000.000000-000{number}"
    return replace(example(seed=number, ratio=0.1 * number), id=name)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        keep(kept(number), tmp_path / "home" / "traces", 10)
    return tmp_path


def inspect(home: Path, *args: str) -> Result:
    return run("inspect", *args, env={"CACHEBLEND_HOME": str(home / "home")})


def test_the_last_run_is_summed_up_as_text(home: Path) -> None:
    result = inspect(home)
    assert result.exit_code == 0, result.stderr
    assert kept(3).id in result.stdout
    assert kept(2).id not in result.stdout
    assert "blend value 0.3" in result.stdout
    both = inspect(home, "--last", "2").stdout
    assert kept(2).id in both
    assert "in A alone" in both


def test_files_are_read_and_written(home: Path) -> None:
    path = home / "run.cbtrace"
    write(kept(1), path)
    done = json.loads(inspect(home, str(path), "--json").stdout)
    assert done == json.loads(json.dumps(as_json(Run(read(path)))))
    for name in ("a.json", "a.csv", "a.html", "a.svg", "a.png", "a.txt"):
        result = inspect(home, str(path), "--out", str(home / name), "--size", "80x24")
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert json.loads((home / "a.json").read_text()) == done
    assert (home / "a.csv").read_text().startswith("position,id,text")
    assert (home / "a.html").read_text().startswith("<!doctype html>")
    assert (home / "a.svg").read_text().startswith("<svg")
    assert (home / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (home / "a.txt").read_text() == inspect(home, str(path)).stdout
    time = inspect(home, str(path), "--format", "csv", "--view", "time").stdout
    assert len(time.splitlines()) == 31


def test_out_spares_the_trace_itself_and_knows_stdout(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    path = home / "run.cbtrace"
    write(kept(1), path)
    before = path.read_bytes()
    result = inspect(home, "run.cbtrace", "--format", "text", "--out", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert path.read_bytes() == before
    assert inspect(home, str(path), "--out", "-").stdout == inspect(home, str(path)).stdout
    assert inspect(home, str(path), "-f", "CSV", "--out", "-").stdout.startswith("position,id")
    assert not (home / "-").exists()


def test_a_question_may_be_longer_than_a_file_name() -> None:
    assert asked(["why is it so " * 500], [], None) is not None


def test_csv_drives_neither_spreadsheets_nor_terminals() -> None:
    texts = ["=1+2", " +x", "@y", "-z", "\x1b[2J", "fine", "\x9b2J"]
    shown = csv_text([{"text": text, "score": -1.5} for text in texts])
    cells = [row["text"] for row in csv.DictReader(io.StringIO(shown))]
    assert cells == ["'=1+2", "' +x", "'@y", "'-z", "␛[2J", "fine", "\\x9b2J"]
    assert ",-1.5" in shown


def test_leaving_does_not_wait_for_a_run() -> None:
    """Nor does the process that is left: it ends long before the run would."""
    code = (
        "import time\nfrom cbcli.inspect.runner import Wish\n"
        "from cbcli.inspect.session import Session\n"
        "class Slow:\n    def run(self, wish, say):\n        time.sleep(600)\n"
        "session = Session(Slow)\nsession.run(Wish('Who?'))\nprint('left')\nsession.leave(3)\n"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "left\n", "")


@pytest.mark.parametrize("redirected", ["stdin", "stdout", "stderr"])
def test_the_view_needs_all_of_a_terminal(redirected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal())
    assert wanted_format(None, False, None) is None
    monkeypatch.setattr(sys, redirected, io.StringIO())
    assert wanted_format(None, False, None) == "text"


def test_ascii_text_is_ascii(home: Path) -> None:
    result = inspect(home, "--ascii", "--last", "2")
    assert result.stdout.isascii()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--view", "pixels"), "tokens, layers"),
        (("--view", "knobs"), "without a terminal"),
        (("--out", "."), "no file to write"),
        (("--out", "nowhere/run.json"), "no folder nowhere"),
        (("--format", "pdf"), "text, json"),
        (("--format", "csv", "--json"), "exclude"),
        (("--size", "wide"), "120x40"),
        (("--size", "9x9"), "out of range"),
        (("run.cbtrace", "--last", "2"), "exclude"),
    ],
)
def test_what_cannot_be_meant_is_refused(home: Path, args: tuple[str, ...], word: str) -> None:
    result = inspect(home, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    nothing = inspect(tmp_path)
    assert (nothing.exit_code, nothing.stdout) == (3, "")
    assert "ask something first" in nothing.stderr
    missing = inspect(tmp_path, "missing.cbtrace")
    assert missing.exit_code == 3
    assert "missing.cbtrace" in missing.stderr


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: data[:-10], "damaged"),
        (lambda data: data[:200] + b"\0" + data[201:], "damaged"),
        (lambda data: b"PK\x03\x04" + data, "no trace"),
        (lambda data: data[:8] + b"\xff\0\0\0" + data[12:], "newer"),
        (lambda data: b"", "no trace"),
    ],
)
def test_damaged_foreign_and_newer_traces_are_named(home: Path, damage: object, word: str) -> None:
    path = home / "run.cbtrace"
    write(kept(1), path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    result = inspect(home, str(path))
    assert (result.exit_code, result.stdout) == (4, "")
    assert len(result.stderr.splitlines()) == 1
    assert word in result.stderr


def test_looking_at_a_trace_takes_no_torch(home: Path) -> None:
    code = (
        "import sys\nfrom cbcli.main import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n"
        "    unwanted = {'torch', 'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)\n"
        "    sys.exit(f'imported {unwanted}' if unwanted else done.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--format", "svg"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "CACHEBLEND_HOME": str(home / "home"),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<svg")
