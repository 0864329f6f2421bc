"""`ask --trace` and `run --trace-dir`: what is written where, and that it costs no answer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cbcli.traces import traces_root
from engine.trace import kept, read
from tests.cbcli.world import World

QUESTION = "When does the pilot boat leave?"


@pytest.fixture
def world(ingested: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """One store for all tests; a working folder of its own, and no traces yet."""
    monkeypatch.chdir(tmp_path)
    if folder(ingested).is_dir():
        shutil.rmtree(folder(ingested))
    folder(ingested).unlink(missing_ok=True)
    return ingested


def folder(world: World) -> Path:
    return world.root / "home" / "traces"


def same(one: Any, other: Any) -> bool:
    return json.loads(json.dumps(one)) == json.loads(json.dumps(other))


def test_a_trace_is_what_json_prints(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.cbtrace"
    printed = world.json("ask", QUESTION, "--trace", str(path), "--compare")
    trace = read(path)
    assert same(trace.result, printed)
    assert (trace.level, trace.question) == ("basic", QUESTION)
    assert path.stat().st_mode & 0o777 == 0o600
    names = [phase.name for phase in trace.phases]
    assert names[:4] == ["open", "retrieve", "tokenize", "find"]
    assert trace.phases[0].start_s == pytest.approx(
        -sum(printed["timing"][f"{name}_s"] for name in ("load_model", "retrieve", "tokenize"))
    )
    (last,) = kept(folder(world))
    assert read(last).id == trace.id


def test_the_last_ones_are_kept(world: World, tmp_path: Path) -> None:
    ids = []
    for index in range(4):
        assert world("ask", f"{QUESTION} {index}", "--ratio", "0").exit_code == 0
        ids.append(read(kept(folder(world))[0]).id)
    assert len(kept(folder(world))) == 4
    (folder(world) / "mine.txt").write_text("stays")
    (folder(world) / "mine.cbtrace").write_text("stays too")
    (tmp_path / "cacheblend.toml").write_text("traces = 2\n")
    assert world("ask", QUESTION).exit_code == 0
    found = kept(folder(world))
    assert len(found) == 2
    assert read(found[1]).id == ids[-1]
    assert {p.name for p in folder(world).glob("mine*")} == {"mine.txt", "mine.cbtrace"}
    assert folder(world).stat().st_mode & 0o777 == 0o700
    (tmp_path / "cacheblend.toml").write_text("traces = 0\n")
    assert world("ask", QUESTION).exit_code == 0
    assert kept(folder(world)) == found


def test_a_full_trace_of_chosen_layers(world: World, tmp_path: Path) -> None:
    path = tmp_path / "run.cbtrace"
    flags = ("--trace-level", "full", "--trace-layers", "1,3")
    assert world("ask", QUESTION, "--trace", str(path), *flags).exit_code == 0
    deviations = read(path).deviations
    assert deviations is not None
    assert deviations.layers == (1, 3)
    error = world.error("ask", QUESTION, "--trace-level", "full", "--trace-layers", "9", code=2)
    assert "trace layer 9" in error["message"]


def test_a_place_that_cannot_be_is_refused_before_any_work(world: World, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.cbtrace"):
        error = world.error("ask", QUESTION, "--trace", str(path), model="none", code=2)
        assert str(path.parent if path.name == "x.cbtrace" else path) in error["message"]
    (tmp_path / "file").write_text("")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"question": "x"}\n')
    error = world.error("run", str(lines), "--trace-dir", str(tmp_path / "file"), code=2)
    assert "--trace-dir" in error["message"]


def test_an_answer_is_there_though_its_trace_is_not(world: World) -> None:
    folder(world).write_text("in the way")
    result = world("ask", QUESTION, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["answer"] is not None
    assert "the trace was not written" in result.stderr
    assert str(folder(world)) in result.stderr


def test_run_records_each_line(world: World, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"question": "Is the log kept?"}\n{"question": ""}\n{"question": "Who keeps the log?"}\n'
    )
    into = tmp_path / "a" / "traces"
    result = world("run", str(lines), "--trace-dir", str(into))
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(p.name for p in into.iterdir()) == ["000001.cbtrace", "000003.cbtrace"]
    trace = read(into / "000003.cbtrace")
    assert trace.question == "Who keeps the log?"
    own = {key: value for key, value in printed[2].items() if key not in ("id", "line", "input")}
    assert same(trace.result, own)
    assert not folder(world).exists()


def test_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert traces_root({"CACHEBLEND_HOME": str(tmp_path)}) == tmp_path / "traces"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = traces_root({})
    assert (root.parent.name, root.name) == ("cacheblend", "traces")
    assert "HOME" not in str(root)
