"""`ask --live` and `ingest --live` as they are used: on a pseudo terminal, and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbcli.inspect.lines import Line, Span, text_of
from cbcli.inspect.run import Run
from cbcli.inspect.theme import Look
from cbcli.inspect.waterfall import part_legend, waterfall_lines
from cbcli.live.region import Region
from engine.trace import read as read_trace
from tests.cbcli.live.screen import Screen, run_on_terminal, terminal
from tests.cbcli.world import World, make_world

QUESTION = "When does the tide turn, who lit the lamp, and how is a rope coiled?"
HOSTILE = "\x1b]0;owned\x07\x1b[2J [bold red]loud[/bold red] [/INST] \x9b31m \u202eback\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """With its documents in the store."""
    patch = pytest.MonkeyPatch()
    world = make_world(tmp_path_factory.mktemp("world"), patch)
    assert world("ingest", "docs").exit_code == 0
    yield world
    patch.undo()


@pytest.fixture
def world(made: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """With a terminal's environment."""
    settings = {"MODEL": "tiny", "DTYPE": "fp32", "MIN_TOKENS": "0", "MAX_TOKENS": "5"}
    for name, value in {**settings, "LIMIT": "500MB", "HOME": str(made.root / "home")}.items():
        monkeypatch.setenv(f"CACHEBLEND_{name}", value)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.chdir(made.root)
    return made


def layers_of(screen: Screen) -> list[str]:
    """The numbers of the waterfall's lines."""
    found = [re.match(r" +(\d+) ( |>)", line) for line in screen.shown]
    return [match[1] for match in found if match]


def test_ask_shows_every_layer_and_the_answer_goes_to_stdout_untouched(world: World) -> None:
    plain = world("ask", QUESTION)
    ran = run_on_terminal("ask", "--live", QUESTION)
    assert ran.code == 0, ran.stderr
    assert ran.stdout == plain.stdout
    screen = Screen().write(ran.stderr)
    layers = json.loads((world.root / "home/models/tiny/config.json").read_text())
    assert layers_of(screen) == [str(n) for n in range(layers["num_hidden_layers"])]
    title = next(line for line in screen.shown if "first token after" in line)
    assert title.startswith("blend question 0.16, ")
    for phase in ("retrieve", "open", "hash", "load", "tokenize", "find", "layers"):
        assert any(line.startswith(phase) and " ms " in line for line in screen.shown), phase
    assert screen.cursor  # it is back
    assert "\x1b[38;" in ran.stderr


@pytest.mark.parametrize("mode", ["full", "reuse", "prefix"])
def test_other_modes_have_their_layers_too(world: World, mode: str) -> None:
    ran = run_on_terminal("ask", "--live", "--mode", mode, QUESTION)
    screen = Screen().write(ran.stderr)
    assert ran.code == 0
    assert layers_of(screen)
    numbers = [line.split()[-1] for line in screen.shown if re.match(r" +\d+  ", line)]
    assert all(float(number) >= 0 for number in numbers)


def test_without_colours_there_are_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    ran = run_on_terminal("ask", "--live", QUESTION)
    sequences = set(re.findall(r"\x1b\[[0-9;]*m", ran.stderr))
    assert sequences <= {"\x1b[0m", "\x1b[1m", "\x1b[2m"}
    assert layers_of(Screen().write(ran.stderr))


def test_with_json_stdout_is_json_and_the_view_stays_to_the_end(world: World) -> None:
    ran = run_on_terminal("ask", "--live", "--json", "--compare", QUESTION)
    timing = json.loads(ran.stdout)["timing"]
    screen = Screen().write(ran.stderr)
    took = next(line for line in screen.shown if "first token after" in line)
    told = float(took.rsplit("after ", 1)[1].removesuffix(" ms").replace(",", ""))
    assert told == pytest.approx(timing["ttft_s"] * 1000, abs=0.5)
    assert any(line.startswith("compare") for line in screen.shown)
    assert any(line.startswith("decode") for line in screen.shown)


def test_what_is_shown_is_what_the_trace_has(world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.cbtrace"
    ran = run_on_terminal("ask", "--live", "--trace", str(file), QUESTION)
    run = Run(read_trace(file))
    look = Look(color=False)
    wanted = [part_legend(run, look, 79), *waterfall_lines(run, look, 79)]
    shown = Screen().write(ran.stderr).shown
    for line in wanted:
        assert text_of(line).rstrip() in shown


@pytest.mark.parametrize("environment", [{}, {"TERM": "dumb"}])
def test_without_a_terminal_there_are_lines(
    world: World, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    if environment:
        monkeypatch.setenv("TERM", "dumb")
        told = run_on_terminal("ask", "--live", QUESTION).stderr.replace("\r", "")
    else:
        told = world("ask", "--live", QUESTION).stderr
    assert "\x1b" not in told
    lines = told.splitlines()
    starts = [line.split(":")[0] for line in lines[:5]]
    assert starts == ["retrieve", "open", "hash", "load", "tokenize"]
    assert re.match(r"first token after [\d.,]+ ms: find ", lines[5])


@pytest.mark.parametrize("flag", ["--quiet", "--json"])
def test_without_a_terminal_quiet_and_json_say_nothing_of_it(world: World, flag: str) -> None:
    ran = world("ask", "--live", flag, QUESTION)
    assert (ran.exit_code, ran.stderr) == (0, "")
    assert world("ingest", "--live", flag, "docs").stderr == ""


def test_a_setting_does_what_the_flag_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_LIVE", "true")
    assert layers_of(Screen().write(run_on_terminal("ask", QUESTION).stderr))
    assert run_on_terminal("ask", "--no-live", "-q", QUESTION).stderr == ""


def test_what_goes_wrong_leaves_one_line_and_no_view(world: World) -> None:
    ran = run_on_terminal("ask", "--live", "--policy", "key", "--check-layer", "77", QUESTION)
    screen = Screen().write(ran.stderr)
    assert ran.code == 2
    assert "".join(screen.shown).startswith("error: ")  # and nothing else, but on two rows
    assert len(screen.shown) == 2
    assert screen.cursor


def test_ingest_shows_its_progress_and_no_document_drives_the_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbcli.live.view.LONGEST", 0.0)  # many pictures, whatever they cost
    folder = world.root / "hostile"
    folder.mkdir()
    (folder / "a[red]b\x1b[2J.md").write_text(HOSTILE + "日本語のテキスト 👩‍👩‍👧 " * 400, "utf-8")
    (folder / "long.txt").write_text("\n\n".join(f"Paragraph {n}. {HOSTILE}" for n in range(400)))
    ran = run_on_terminal("ingest", "--live", "--chunk-tokens", "32", "hostile")
    assert ran.code == 0, ran.stderr
    screen = Screen()
    screen.write(ran.stderr)  # which fails for any sequence that the view has no use for
    assert screen.shown == []  # it has gone; what was done is on stdout
    assert "2 documents (2 new)" in ran.stdout
    for label in ("documents", "chunks", "tokens", "stored", "time left"):
        assert label in ran.stderr
    assert "last chunks written" in ran.stderr
    assert "a[red]b" in ran.stderr
    assert "␛]0;owned␇" in ran.stderr
    for hostile in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"):
        assert hostile not in ran.stderr
    assert screen.cursor


def on_a_terminal_of_its_own(world: World, *args: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command in another process, all of its streams one terminal."""
    master, slave = pty.openpty()
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", "from cbcli.main import main; main()", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=world.root,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    os.close(slave)
    return process, master


def test_ctrl_c_leaves_a_clean_terminal_and_130(world: World) -> None:
    (world.root / "much.md").write_text(
        "\n\n".join(f"Note {n}: the tide of day {n} is {n * 7} feet." for n in range(20000))
    )
    process, master = on_a_terminal_of_its_own(world, "ingest", "--live", "much.md")
    written, deadline = b"", time.monotonic() + 90
    interrupted = False
    while time.monotonic() < deadline:
        try:
            piece = os.read(master, 65536)
        except OSError:  # it has ended
            break
        written += piece
        if not interrupted and b"last chunks written" in written:
            interrupted = True
            process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    os.close(master)
    screen = Screen().write(written.decode())
    assert screen.cursor
    assert screen.shown[0].startswith("error: interrupted: ")
    assert "last chunks written" not in "\n".join(screen.shown)


class Bars:
    """Three lines as wide as they may be."""

    def lines(self, columns: int, rows: int | None, look: Look) -> list[Line]:
        return [(Span(f"{columns}".ljust(columns, "x")),)] * 3

    def status(self) -> str:
        return ""

    def told(self, label: str, facts: str) -> None: ...


def test_a_terminal_that_becomes_narrower_keeps_no_rest_of_the_wider_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    size = os.terminal_size((61, 24))
    monkeypatch.setattr(os, "get_terminal_size", lambda number=1: size)
    with terminal() as (stream, read):

        def await_lines(start: str) -> None:
            deadline = time.monotonic() + 20
            while b"".join(read).count(start.encode()) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)

        with Region(Bars(), stream, Look(color=False), interval=0.01):
            await_lines("60xx")
            size = os.terminal_size((21, 24))
            await_lines("20xx")
    wide, narrow = b"".join(read).decode().rsplit("60" + "x" * 58, 1)[1].split("20", 1)
    # Each of the wide lines, of 60 cells, is three lines of 21: nine, and it is in the last.
    assert wide.count("\x1b[1A") == 8
    assert wide.count("\x1b[2K") == 9
    assert narrow.count("20xx") >= 2
