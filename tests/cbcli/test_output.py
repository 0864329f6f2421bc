"""Data on stdout, all else on stderr, and nothing printed is obeyed by a terminal."""

from __future__ import annotations

import io
import json
import math

import pytest

from cbcli.errors import Failure
from cbcli.output import Output
from cbcli.progress import Progress
from tests.cbcli.terminal import Terminal

HOSTILE = "\x1b[2Jname\n[/bold]\x9b1m\u202e"


def output(
    stdout: io.StringIO | None = None,
    stderr: io.StringIO | None = None,
    env: dict[str, str] | None = None,
    json: bool = False,
    quiet: bool = False,
    verbose: int = 0,
) -> tuple[Output, io.StringIO, io.StringIO]:
    stdout, stderr = stdout or io.StringIO(), stderr or io.StringIO()
    out = Output(
        json=json, quiet=quiet, verbose=verbose, stdout=stdout, stderr=stderr, env=env or {}
    )
    return out, stdout, stderr


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_way_of_printing_lets_control_characters_through(stream: type[io.StringIO]) -> None:
    out, stdout, stderr = output(stream(), stream(), env={"NO_COLOR": "1"}, verbose=2)
    out.line(HOSTILE)
    out.table([HOSTILE, "b"], [[HOSTILE, HOSTILE]])
    out.pairs([(HOSTILE, HOSTILE)])
    for piece in HOSTILE:
        out.piece(piece)
    out.end_pieces()
    out.note(HOSTILE)
    out.warn(HOSTILE, HOSTILE)
    out.error(Failure("failed", HOSTILE, HOSTILE, 1))
    for text in (stdout.getvalue(), stderr.getvalue()):
        assert text.count("␛[2J") >= 4
        assert not {"\x1b", "\x9b", "\u202e", "\r"} & set(text)
        assert "[/bold]" in text


def test_a_progress_label_is_harmless_too() -> None:
    stderr = io.StringIO()
    out = Output(stdout=io.StringIO(), stderr=stderr, env={"CACHEBLEND_PROGRESS": "plain"})
    ticks = iter(range(0, 1000, 20))
    with out.progress(HOSTILE, unit="tokens", total=10) as progress:
        progress._clock = lambda: float(next(ticks)) + 1e9
        progress.update(5)
    assert "␛[2J" in stderr.getvalue()
    assert "\x1b" not in stderr.getvalue()


def test_json_is_one_line_and_escapes_by_itself() -> None:
    out, stdout, _ = output(json=True)
    out.data({"text": HOSTILE, "kl": math.inf, "list": [math.nan, 1.5], "lone": "\udcff"})
    assert stdout.getvalue().count("\n") == 1
    assert stdout.getvalue().isascii()
    read = json.loads(stdout.getvalue())
    assert read == {"text": HOSTILE, "kl": None, "list": [None, 1.5], "lone": "\udcff"}


def test_errors_and_warnings_are_json_lines_with_json() -> None:
    out, stdout, stderr = output(json=True)
    out.warn("one file was left out", "see --verbose")
    out.error(Failure("not_found", "no model x", "run y", 3))
    first, second = stderr.getvalue().splitlines()
    assert json.loads(first) == {
        "warning": {"message": "one file was left out", "hint": "see --verbose"}
    }
    assert json.loads(second) == {
        "error": {"kind": "not_found", "message": "no model x", "hint": "run y"}
    }
    assert stdout.getvalue() == ""


def test_notes_are_silent_with_quiet_and_in_a_json_pipeline() -> None:
    for options in ({"quiet": True}, {"json": True}):
        out, _, stderr = output(**options)  # type: ignore[arg-type]
        out.note("working")
        with out.progress("reading", unit="tokens", total=3) as progress:
            progress.update(1)
        assert stderr.getvalue() == ""
    out, _, terminal = output(stderr=Terminal(), json=True)
    out.note("working")
    assert "working" in terminal.getvalue()


def test_details_need_verbose() -> None:
    for verbose, said in ((0, ""), (1, "one\n"), (2, "one\ntwo\n")):
        out, _, stderr = output(verbose=verbose)
        out.note("one", level=1)
        out.note("two", level=2)
        assert stderr.getvalue() == said


def test_an_error_is_told_even_with_quiet() -> None:
    out, _, stderr = output(quiet=True)
    out.warn("hidden")
    out.error(Failure("failed", "it broke", "mend it", 1))
    assert stderr.getvalue() == "error: it broke (mend it)\n"


def test_piped_tables_are_plain_and_complete() -> None:
    out, stdout, _ = output()
    out.table(["name", "tokens"], [["a" * 300, 5], ["東京", 1200]], right=["tokens"])
    assert stdout.getvalue().splitlines() == [
        "name" + " " * 296 + "  tokens",
        "a" * 300 + "  " + "     5",
        "東京" + " " * 296 + "  " + "  1200",
    ]


def test_a_table_is_shortened_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out, stdout, _ = output(stdout=Terminal(), env={"NO_COLOR": "1"})
    out.table(["name", "tokens"], [["a" * 300, 5]], right=["tokens"])
    lines = stdout.getvalue().splitlines()
    assert max(map(len, lines)) == 30
    assert lines[1] == "a" * 21 + "…  " + "     5"


def test_what_all_rows_share_is_said_once_where_columns_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["chunk-0001", "smollm2-135m", "bf16"], ["chunk-0002", "smollm2-135m", "fp8"]]
    rows.append(["chunk-0003", "", ""])
    once = ["model", "dtype"]
    for columns, shown in (("40", True), ("24", False)):
        monkeypatch.setenv("COLUMNS", columns)
        out, stdout, stderr = output(stdout=Terminal())
        out.table(["chunk", "model", "dtype"], rows, once=once)
        assert ("smollm2-135m" in stdout.getvalue()) is shown
        assert stderr.getvalue() == ("" if shown else "all of them: model smollm2-135m\n")
        assert "chunk-0003" in stdout.getvalue()
        assert "fp8" in stdout.getvalue()
    out, stdout, stderr = output()
    out.table(["chunk", "model", "dtype"], rows, once=once)
    assert stdout.getvalue().count("smollm2-135m") == 2


def test_colour_only_on_a_terminal_that_wants_it() -> None:
    for stream, env, coloured in (
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"CLICOLOR": "0"}, False),
        (Terminal(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "0"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True),
    ):
        out, _, stderr = output(stderr=stream, env=env)
        out.error(Failure("failed", "it broke", "", 1))
        assert ("\x1b[" in stderr.getvalue()) is coloured


def test_pieces_end_with_one_newline() -> None:
    for pieces, shown in ((["a", "b"], "ab\n"), (["a\n"], "a\n"), (["a\r", "\nb\r"], "a\nb␍\n")):
        out, stdout, _ = output()
        for piece in pieces:
            out.piece(piece)
        out.end_pieces()
        out.end_pieces()
        assert stdout.getvalue() == shown


def test_a_warning_waits_for_the_end_of_a_streamed_answer() -> None:
    out, stdout, stderr = output()
    out.piece("The")
    out.warn("slow remote")
    out.piece(" tide.")
    assert stderr.getvalue() == ""
    out.end_pieces()
    assert stdout.getvalue() == "The tide.\n"
    assert stderr.getvalue() == "warning: slow remote\n"
    out.warn("at once")
    assert stderr.getvalue().endswith("warning: at once\n")


def test_an_error_does_not_run_into_a_streamed_answer() -> None:
    out, stdout, _ = output()
    out.piece("half an ans")
    out.error(Failure("failed", "it broke", "", 1))
    assert stdout.getvalue() == "half an ans\n"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_without_a_bar_is_a_line_now_and_then() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(
        "ingest", unit="tokens", total=10_000, stream=stream, bar=False, silent=False, clock=clock
    )
    with progress:
        for second in range(61):
            clock.now = float(second)
            progress.update(1000 + second * 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0] == "ingest: 2,000 of 10,000 tokens (20%), 100 tokens/s, 1 min 20 s left"


def test_rates_do_not_count_what_was_done_before() -> None:
    clock = Clock()
    progress = Progress(
        "get", unit="bytes", total=100_000, stream=io.StringIO(), bar=False, silent=True,
        clock=clock,
    )  # fmt: skip
    progress.update(50_000)
    progress.update(52_000)
    clock.now = 10.0
    progress.update(60_000)
    assert progress.facts(60_000, 10.0) == ("60.0 kB of 100 kB (60%), 1.0 kB/s, 40.0 s left")
    progress.restart("check")
    assert progress.facts(5, 10.0) == "5 B"


def test_on_a_terminal_progress_is_a_bar_that_goes_away() -> None:
    terminal = Terminal()
    out = Output(stdout=io.StringIO(), stderr=terminal, env={})
    with out.progress("reading [/bold] {x}", unit="tokens", total=10) as progress:
        progress.update(4)
        progress.update(10)
    shown = terminal.getvalue()
    assert "reading [/bold] {x}" in shown
    assert "10 of 10 tokens" in shown
    assert shown.rstrip("\n").endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_bar_waits_for_something_to_show() -> None:
    terminal = Terminal()
    out = Output(stdout=io.StringIO(), stderr=terminal, env={})
    with out.progress("reading"):
        out.note("nothing to do")
    assert terminal.getvalue() == "nothing to do\n"


def test_notes_go_above_the_bar_and_after_it_to_the_stream() -> None:
    terminal = Terminal()
    out = Output(stdout=io.StringIO(), stderr=terminal, env={})
    with out.progress("reading", total=3) as progress:
        progress.update(1)
        out.warn("[/x] \x1b[2J left out")
        progress.update(2)
    out.note("done")
    shown = terminal.getvalue()
    assert "[/x] ␛[2J left out\n" in shown
    assert shown.endswith("done\n")
    assert "\x1b[2J" not in shown


def test_a_dumb_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    out = Output(stdout=io.StringIO(), stderr=terminal, env={"TERM": "dumb"})
    with out.progress("reading", unit="tokens", total=10) as progress:
        progress.update(4)
    assert terminal.getvalue() == ""
