"""`cacheblend bench`: tables, JSON, CSV, pictures, and everything that can be wrong with it."""

import csv
import importlib.util
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cbcli import bench_plot
from engine.bench import conditions
from tests.cbcli.world import World, make_world

SHORT = ("--tokens", "120", "--pairs", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        return make_world(tmp_path_factory.mktemp("world"), patch)


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


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine would be warned about, on stderr."""
    monkeypatch.setattr(conditions, "_busy_cores", lambda seconds: 0.0)


def test_ttft_json(world: World, temporary: Path) -> None:
    report = world.json("bench", "ttft", "--tokens", "120,240", "--pairs", "2")
    assert {name: report[name] for name in ("schema", "bench", "pairs", "peers")} == {
        "schema": 1,
        "bench": "ttft",
        "pairs": 2,
        "peers": [],
    }
    assert report["model"]["dtype"] == "fp32"
    assert report["conditions"]["torch"].startswith("2.")
    rows = report["rows"]
    assert [row["tokens"] for row in rows] == [120] * 11 + [240] * 11
    assert [row["way"] for row in rows[:3]] == ["full", "reuse", "blend"]
    assert {row["policy"] for row in rows} == {None, "question", "value", "explicit"}
    for row in rows:
        assert len(row["seconds"]) == 2
        assert isinstance(row["bound"], float)
        assert row["share"] == pytest.approx(row["speedup"] / row["bound"])
    assert [fit["points"] for fit in report["fits"]] == [8, 8, 8]
    assert list(temporary.iterdir()) == []
    assert not (world.root / "home/store").exists()


def test_ttft_table_names_the_machine_and_every_way(world: World) -> None:
    result = world(
        *("bench", "ttft", *SHORT, "--ratios", "0.5,0.1", "--policies", "random"),
        *("--loaders", "sync,async", "--threads", "1"),
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny, fp32 on cpu (")
    assert "1 of " in lines[0]
    assert "torch 2." in lines[0]
    assert "medians of 1 round" in lines[1]
    assert lines[2].split() == [
        *("way", "tokens", "computed", "first", "token", "spread", "speedup", "bound", "share")
    ]
    ways = [line.split("  ")[0] for line in lines[3:10]]
    assert ways[:3] == ["full prefill", "reuse sync", "reuse async"]
    assert ways[3:] == [
        f"blend random {ratio} {loader}" for ratio in (0.1, 0.5) for loader in ("sync", "async")
    ]
    assert "R2" in lines[10]
    assert "120 tokens: round 1 of 1" in result.stderr


def test_ttft_csv_has_the_rows_of_the_json(world: World, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    report = world.json("bench", "ttft", *SHORT, "--policies", "value", "--csv", str(path))
    rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    assert len(rows) == len(report["rows"]) == 5
    for row, told in zip(rows, report["rows"], strict=True):
        assert list(row) == list(told)
        assert float(row["median_s"]) == told["median_s"]
        assert row["policy"] == (told["policy"] or "")
    result = world("bench", "decode", "--tokens", "20", "--output", "3", "--csv", "-")
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert (row["way"], row["tokens"], row["output"]) == ("ours", "20", "3")
    assert len(row["seconds"].split(" ")) == 5


@pytest.mark.parametrize("name", ["ttft.svg", "ttft.PNG"])
def test_ttft_is_drawn(world: World, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    result = world("bench", "ttft", "--tokens", "120,240", "--pairs", "1", "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    content = path.read_bytes()
    if name.endswith(".svg"):
        for text in ("full prefill", "blend question 0.16", "explicit: bound", "recompute ratio"):
            assert text.encode() in content
    else:
        assert content.startswith(b"\x89PNG")


def test_ingest_load_and_decode(world: World, temporary: Path) -> None:
    ingest = world.json("bench", "ingest", "--lengths", "20,40", "--tokens", "80", "--pairs", "1")
    assert [(r["chunk_tokens"], r["chunks"]) for r in ingest["rows"]] == [(20, 4), (40, 2)]
    load = world.json(
        *("bench", "load", *SHORT, "--loaders", "sync,pipelined"),
        *("--bandwidth", "unlimited", "--bandwidth", "50MB/s"),
    )
    assert [(r["loader"], r["bandwidth"]) for r in load["rows"]] == [
        *(("sync", None), ("pipelined", None)),
        *(("sync", 50_000_000), ("pipelined", 50_000_000)),
    ]
    decode = world.json("bench", "decode", "--tokens", "30,20", "--output", "4", "--pairs", "1")
    assert [r["tokens"] for r in decode["rows"]] == [20, 30]
    for args, word in [
        (("ingest", "--lengths", "20", "--tokens", "40"), "full prefill"),
        (("load", "--tokens", "120"), "stall/sync load"),
        (("decode", "--tokens", "20", "--output", "2"), "over ours"),
    ]:
        result = world("bench", *args, "--pairs", "1", "-q")
        assert word in result.stdout
        assert result.stderr == ""
    assert list(temporary.iterdir()) == []


def test_prompts_are_made_of_the_text_given(world: World, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_bytes(b"the watch \xff " * 20)
    tokens = [
        world.json("bench", "ttft", *SHORT, "--policies", "value", *given)["rows"][0]["first_token"]
        for given in ((), ("--text", str(text)), ("--text", str(text)))
    ]
    assert tokens[1] == tokens[2] != tokens[0]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("ttft", "--tokens", "many"), 2, "no number of tokens"),
        (("ttft", "--tokens", ""), 2, "nothing was given"),
        (("ttft", "--tokens", "50"), 2, "too short"),
        (("ttft", "--tokens", "4000"), 2, "context of 2048"),
        (("ttft", "--ratios", "1.5"), 2, "outside 0 to 1"),
        (("ttft", "--policies", "best"), 2, "policy 'best' is unknown"),
        (("ttft", "--loaders", "fast"), 2, "loader 'fast' is unknown"),
        (("ttft", "--check-layer", "0"), 2, "check layer 0"),
        (("ttft", "--check-layer", "9"), 2, "check layer 9"),
        (("ttft", "--pairs", "0"), 2, "pairs"),
        (("ttft", "--text", "nowhere.txt"), 3, "no such file"),
        (("ttft", "--peer", "ollama"), 2, "--peer ollama: unknown"),
        (("ttft", "--peer", "vllm=/nowhere"), 2, "cannot be run"),
        (("ttft", "--peer", "vllm", "--peer", "vllm"), 2, "given twice"),
        (("ttft", "--peer", "llamacpp"), 2, "needs the model's weights"),
        (("ttft", "--peer", "llamacpp", "--gguf", "no.gguf"), 3, "no such file"),
        (("ttft", "--csv", "-"), 2, "both want standard output"),
        (("ttft", "--csv", "nowhere/x.csv"), 2, "no such folder"),
        (("ttft", "--plot", "x.pdf"), 2, "not a .svg or .png"),
        (("ingest", "--lengths", "5000"), 2, "do not fit"),
        (("load", "--bandwidth", "fast"), 2, "no rate"),
        (("load", "--ratio", "x"), 2, "not a number"),
        (("decode", "--peer", "vllm"), 2, "transformers only"),
        (("decode", "--tokens", "2047"), 2, "do not fit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    from engine.api import Engine

    monkeypatch.setattr(Engine, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert message in world.error("bench", *args, code=code)["message"]


def test_a_peer_or_matplotlib_that_is_missing_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        (world.root / "x.gguf").write_bytes(b"")
        error = world.error(
            "bench", "ttft", *SHORT, "--peer", "llamacpp", "--gguf", "x.gguf", code=2
        )
        assert "has no llama_cpp" in error["message"]
        assert "pip install llama-cpp-python" in error["hint"]
    monkeypatch.setattr(bench_plot.importlib.util, "find_spec", lambda name: None)
    error = world.error("bench", "ttft", *SHORT, "--plot", "x.svg", code=2)
    assert "matplotlib" in error["message"]
    assert "cacheblend[plot]" in error["hint"]


def test_an_interrupt_leaves_no_store(
    world: World, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.prefill import Prefiller

    there: list[Path] = []

    def interrupted(*args: Any, **named: Any) -> None:
        there.extend(temporary.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(Prefiller, "__call__", interrupted)
    result = world("bench", "ttft", *SHORT, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stderr)["error"]["kind"] == "interrupted"
    assert len(there) == 1
    assert list(temporary.iterdir()) == []
