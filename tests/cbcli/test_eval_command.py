"""`cacheblend eval`: tables, JSON, CSV, pictures, resuming, and everything that can be wrong."""

import csv
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cbcli import bench_plot
from cbcli.eval_options import split_policies
from engine.evaluation import subject
from tests.cbcli.world import World, add_model, make_world

LINES = [
    {
        "id": f"q{number}",
        "question": f"When does boat {number} leave?",
        "chunks": [
            f"Pilot boat {number} leaves at six, when the lamp of the lighthouse is lit.",
            {
                "text": "The tide turns twice a day. A rope is coiled with the sun.",
                "source": "t.md",
            },
            "The harbour master is called Orla. She keeps the log of every boat.",
        ],
        "answers": ["six", "at six"],
    }
    for number in range(3)
]
SHORT = ("--ratios", "0,0.3,1", "--policies", "value", "-n", "3", "--tokens", "4")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("world"), patch)
    (world.root / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return world


@pytest.fixture
def world(made: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(made.root)
    return made


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def timeless(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows without what differs from run to run."""
    return [
        {name: value for name, value in row.items() if name not in ("ttft_s", "speedup")}
        for row in report["rows"]
    ]


def test_json(world: World, temporary: Path) -> None:
    report = world.json("eval", "q.jsonl", *SHORT, "--shuffle-chunks", "5", "--passages", "2")
    assert {name: report[name] for name in ("schema", "forced_tokens", "metric", "max_tokens")} == {
        "schema": 1,
        "forced_tokens": 4,
        "metric": "f1",
        "max_tokens": 3,
    }
    assert report["model"]["dtype"] == "fp32"
    assert report["conditions"]["torch"].startswith("2.")
    data = report["data"]
    assert (data["files"], data["questions"], data["passages"]) == (["q.jsonl"], 3, [2, 2])
    assert (data["shuffle"], len(data["digest"])) == (5, 32)
    rows = report["rows"]
    assert [(r["mode"], r["policy"], r["ratio"]) for r in rows] == [
        ("full", None, None),
        ("reuse", None, 0),
        ("blend", "value", 0.3),
        ("blend", "random", 0.3),
        ("blend", None, 1),
    ]
    assert rows[0]["kl"] < 1e-9
    assert rows[4]["kl"] < 1e-9
    assert rows[1]["kl"] > rows[2]["kl"] > 0
    assert all(row["questions"] == row["scored"] == 3 for row in rows)
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in rows)
    assert list(temporary.iterdir()) == []
    assert not (world.root / "home/store").exists()


def test_table(world: World) -> None:
    result = world("eval", "q.jsonl", *SHORT, "--check-layer", "1,2", "--modes", "blend,prefix")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny, fp32 on cpu (")
    assert lines[1].startswith("3 questions, 3 passages each, prompts of ")
    assert "along its first 4 tokens; answers of up to 3 tokens" in lines[2]
    assert lines[3].split("  ")[0] == "way"
    assert "F1" in lines[3]
    assert [line.split("  ")[0] for line in lines[4:]] == [
        *("full prefill", "reuse", "blend value 0.3 @1", "blend value 0.3 @2"),
        *("blend random 0.3", "prefix", "blend all 1"),
    ]


def test_rows_that_differ_in_their_context_say_so(world: World, tmp_path: Path) -> None:
    args = ("eval", "q.jsonl", "--limit", "1", "--ratios", "0.3,1", "--policies", "random")
    picture = tmp_path / "x.svg"
    result = world(
        *(*args, "--no-answers", "--tokens", "2", "--contexts", "prefix,none"),
        *("--plot", str(picture)),
    )
    assert result.exit_code == 0, result.stderr
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[4:]] == [
        *("full prefill", "reuse behind prefix", "blend random 0.3 behind prefix"),
        *("reuse behind none", "blend random 0.3 behind none", "blend all 1"),
    ]
    assert b"random behind none" in picture.read_bytes()


def test_without_answers_nothing_is_scored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "generate", lambda *a: pytest.fail("an answer was made"))
    args = ("eval", "q.jsonl", "--ratios", "0.3", "--tokens", "2", "--limit", "1", "--no-answers")
    result = world(*args, "--no-random")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "F1" not in lines[3]
    assert "1 question," in lines[1]
    assert len(lines) == 8
    report = world.json(*args)
    assert {row["policy"] for row in report["rows"]} == {None, "question", "value", "random"}
    assert report["metric"] is None
    assert all(row["score"] is None for row in report["rows"])


@pytest.mark.skipif(importlib.util.find_spec("rouge_score") is None, reason="no rouge-score")
def test_summaries_are_scored_with_rouge_l(world: World, tmp_path: Path) -> None:
    example = {"text": "Dialogue: Ann: Tea?\nBen: Yes.\nSummary: Ben wants tea."}
    item = {
        "question": "Dialogue: Cas: Is the boat in?\nDee: At six.\nSummary: ",
        "ctxs": [example, {"text": "Dialogue: Eve: Rope?\nFay: Wet.\nSummary: It is wet."}],
        "answers": ["The boat is in at six."],
    }
    path = tmp_path / "samsum.json"
    path.write_text(json.dumps([item]))
    args = ("eval", str(path), "--ratios", "1", "--tokens", "2")
    assert world.json(*args)["max_tokens"] == 128
    result = world(*args, "-n", "4")
    assert result.exit_code == 0, result.stderr
    assert "ROUGE-L" in result.stdout
    assert world.json(*args, "-n", "4", "--metric", "f1")["metric"] == "f1"


def test_csv_has_the_rows_of_the_json(world: World, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    report = world.json("eval", "q.jsonl", *SHORT, "--limit", "1", "--csv", str(path))
    rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    assert len(rows) == len(report["rows"]) == 5
    for row, told in zip(rows, report["rows"], strict=True):
        assert list(row) == list(told)
        assert float(row["kl"]) == told["kl"]
        assert row["policy"] == (told["policy"] or "")


@pytest.mark.parametrize("name", ["q.svg", "q.PNG", "q.pdf"])
def test_pictures(world: World, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    args = ("eval", "q.jsonl", *SHORT, "--state", str(tmp_path / "s.jsonl"), "--plot", str(path))
    assert world(*args).exit_code == 0
    content = path.read_bytes()
    if name.endswith(".svg"):
        for text in ("value", "random", "recompute ratio", "speedup of the first token", "nats"):
            assert text.encode() in content
    else:
        assert content.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG")
    assert world(*args).exit_code == 0  # of the same results
    assert path.read_bytes() == content


def test_an_interrupted_run_goes_on_to_the_same_figures(
    world: World, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, state = ("eval", "q.jsonl", *SHORT), tmp_path / "state.jsonl"
    whole = world.json(*args)
    with monkeypatch.context() as patch:
        compare, left = subject.agreement, [8]

        def interrupted(*given: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return compare(*given)

        patch.setattr(subject, "agreement", interrupted)
        error = world.error(*args, "--state", str(state), code=130)
    assert error["message"] == "interrupted: 1 of 3 questions done"
    assert "goes on from there" in error["hint"]
    assert list(temporary.iterdir()) == []
    state.write_bytes(state.read_bytes() + b'{"number": 1, "na')  # as a crash would leave it
    resumed = world(*args, "--state", str(state), "--json")
    assert resumed.exit_code == 0, resumed.stderr
    assert timeless(json.loads(resumed.stdout)) == timeless(whole)
    assert len(state.read_text().splitlines()) == 4
    # All of it is there now: fewer questions, and more, are taken from it without the weights.
    monkeypatch.setattr(subject, "reference", lambda *a: pytest.fail("it was computed again"))
    again = world.json(*args, "--state", str(state))
    assert again["rows"] == json.loads(resumed.stdout)["rows"]
    assert world.json(*args, "--state", str(state), "--limit", "2")["data"]["questions"] == 2


def test_a_limit_can_be_raised_later(world: World, tmp_path: Path) -> None:
    args = ("eval", "q.jsonl", *SHORT, "--shuffle-chunks", "1")
    state = ("--state", str(tmp_path / "state.jsonl"))
    world.json(*args, *state, "--limit", "1")
    assert timeless(world.json(*args, *state)) == timeless(world.json(*args))


def test_other_settings_are_refused(world: World, tmp_path: Path) -> None:
    args = ("eval", "q.jsonl", "--tokens", "2", "--no-answers", "--limit", "1")
    state = ("--state", str(tmp_path / "state.jsonl"))
    world.json(*args, *state, "--ratios", "0.3")
    for change, message in [
        (("--ratios", "0.3,0.5"), "with ratios 0.3, now it is 0.3,0.5"),
        (("--ratios", "0.3", "--passages", "2"), "with passages none, now it is 2"),
        (("--ratios", "0.3", "--system", "Be short."), "with prompt "),
        (("--ratios", "0.3", "--dtype", "bf16"), "with dtype fp32, now it is bf16"),
    ]:
        assert message in world.error(*args, *state, *change, code=2)["message"]
    add_model(world.root, "other", seed=1)
    error = world.error(*args, *state, "--ratios", "0.3", "--model", "other", code=2)
    assert "with model " in error["message"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("none.jsonl",), 3, "no file none.jsonl"),
        (("docs",), 2, "docs is a folder"),
        (("docs/one.md",), 2, "not JSON"),
        (("q.jsonl", "--passages", "4"), 2, "q0 has 3 passages"),
        (("q.jsonl", "--passages", "0"), 2, "passages"),
        (("q.jsonl", "--contexts", "all"), 2, "context 'all' is unknown"),
        (("q.jsonl", "--modes", "fast"), 2, "mode 'fast' is unknown"),
        (("q.jsonl", "--policies", "best"), 2, "policy 'best' is unknown"),
        (("q.jsonl", "--policies", "explicit"), 2, "explicit"),
        (("q.jsonl", "--policies", ","), 2, "nothing was given"),
        (("q.jsonl", "--ratios", "2"), 2, "outside 0 to 1"),
        (("q.jsonl", "--check-layer", "0"), 2, "check layer 0"),
        (("q.jsonl", "--check-layer", "1,9"), 2, "check layer 9"),
        (("q.jsonl", "--check-layer", "x"), 2, "'x' is no layer"),
        (("q.jsonl", "--metric", "bleu"), 2, "metric 'bleu' is unknown"),
        (("q.jsonl", "--metric", "f1", "--no-answers"), 2, "--no-answers makes none"),
        (("q.jsonl", "--csv", "-"), 2, "both want standard output"),
        (("q.jsonl", "--csv", "nowhere/x.csv"), 2, "no such folder"),
        (("q.jsonl", "--plot", "x.gif"), 2, "not a .svg or .png or .pdf"),
        (("q.jsonl", "--state", "nowhere/x"), 2, "no such folder"),
        (("q.jsonl", "--state", "q.jsonl"), 2, "holds the questions"),
        (("q.jsonl", "--state", "docs/one.md"), 2, "holds something else"),
        (("long.jsonl",), 2, "long makes a prompt of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_evaluated_is_refused_before_the_model_is_loaded(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    from engine.api import Engine

    long = {"id": "long", "question": "Why?", "chunks": ["The tide turns. " * 2000]}
    (world.root / "long.jsonl").write_text(json.dumps(long))
    monkeypatch.setattr(Engine, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert message in world.error("eval", *args, code=code)["message"]


def test_what_is_not_installed_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("rouge_score", "matplotlib")
    monkeypatch.setattr(
        bench_plot.importlib.util,
        "find_spec",
        lambda name, *rest: None if name in missing else find(name, *rest),
    )
    for args, extra in ((("--metric", "rouge-l"), "eval"), (("--plot", "x.svg"), "plot")):
        error = world.error("eval", "q.jsonl", *args, code=2)
        assert f"cacheblend[{extra}]" in error["hint"]


def test_commas_part_policies_but_not_their_settings() -> None:
    assert split_policies(["value, key", "random"]) == ("value", "key", "random")
    assert split_policies(["question:layers=8-20,heads=mean,value"]) == (
        "question:layers=8-20,heads=mean",
        "value",
    )
    assert split_policies(["hybrid:question=0.7,value=0.3,first-k:k=16", "hybrid:a=1,b=2"]) == (
        "hybrid:question=0.7,value=0.3",
        "first-k:k=16",
        "hybrid:a=1,b=2",
    )
    assert split_policies(["value", "value,key"]) == ("value", "key")
