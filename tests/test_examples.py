"""The example documents: their size, their questions, and that retrieval finds the answers."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_store.keys import chunk_id
from engine.retrieval import BM25Retriever
from tests.cbcli.world import add_model

EXAMPLES = Path(__file__).parent.parent / "examples"
DOCUMENTS = {path.name: path.read_text("utf-8") for path in sorted((EXAMPLES / "docs").iterdir())}
QUESTIONS: list[dict[str, Any]] = json.loads((EXAMPLES / "questions.json").read_text("utf-8"))
CROSS = [question for question in QUESTIONS if question["kind"] == "cross"]


@dataclass(frozen=True)
class Piece:
    source: str
    text: str

    @property
    def chunk_id(self) -> str:
        return chunk_id(self.text)


def pieces(source: str, text: str, words: int = 250) -> list[Piece]:
    """Cut a text at blank lines into pieces of about `words` words."""
    found: list[str] = [""]
    for paragraph in re.split(r"(?<=\n)\n+", text):
        if found[-1] and len((found[-1] + paragraph).split()) > words:
            found.append("")
        found[-1] += paragraph + "\n"
    return [Piece(source, part) for part in found]


@pytest.fixture(scope="module")
def retriever() -> BM25Retriever[Piece]:
    return BM25Retriever(
        [piece for name, text in DOCUMENTS.items() for piece in pieces(name, text)]
    )


def top_six(retriever: BM25Retriever[Piece], question: dict[str, Any]) -> list[Piece]:
    return [hit.chunk for hit in retriever.search(question["question"], 6)]


def test_there_are_documents_of_several_kinds_and_enough_questions() -> None:
    assert len(DOCUMENTS) >= 12
    assert {Path(name).suffix for name in DOCUMENTS} == {".md", ".rst", ".txt"}
    assert len(QUESTIONS) >= 20
    assert len({question["question"] for question in QUESTIONS}) == len(QUESTIONS)
    assert len(CROSS) >= 10


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_600_to_1500_words(name: str) -> None:
    assert 600 <= len(re.findall(r"\w[\w'’.,-]*", DOCUMENTS[name])) <= 1500


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["question"])
def test_a_question_names_the_documents_that_hold_its_answer(question: dict[str, Any]) -> None:
    assert set(question) == {"question", "answer", "sources", "kind"}
    assert question["kind"] == ("cross" if len(question["sources"]) > 1 else "single")
    assert set(question["sources"]) <= set(DOCUMENTS)
    assert any(question["answer"] in DOCUMENTS[source] for source in question["sources"])
    assert question["answer"] not in question["question"]


def test_the_answer_is_among_the_six_best_chunks(retriever: BM25Retriever[Piece]) -> None:
    missed = [
        question["question"]
        for question in QUESTIONS
        if not any(
            question["answer"] in piece.text and piece.source in question["sources"]
            for piece in top_six(retriever, question)
        )
    ]
    assert len(missed) <= 0.1 * len(QUESTIONS), missed


def test_most_cross_questions_get_a_chunk_of_each_document(retriever: BM25Retriever[Piece]) -> None:
    lacking = [
        question["question"]
        for question in CROSS
        if not set(question["sources"]) <= {piece.source for piece in top_six(retriever, question)}
    ]
    assert len(lacking) <= 0.25 * len(CROSS), lacking


def test_contexts_are_measured_for_any_model(tmp_path: Path) -> None:
    model = add_model(tmp_path, "tiny")
    passages = [{"title": f"Buoy {n}", "text": f"It is {n} feet long and red."} for n in range(3)]
    items = [{"question": "How long is buoy 2?", "ctxs": passages}]
    (tmp_path / "questions.json").write_text(json.dumps(items))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "measure_context.py"), str(model), "questions.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["prefix", "bos", "none"]
    assert all(float(value) > 0 for row in rows for value in row[1:])
    assert len({tuple(row[1:]) for row in rows}) == 3


def test_stored_types_are_measured_for_any_model(tmp_path: Path) -> None:
    model = add_model(tmp_path, "tiny", head_dim=64)
    passages = [{"title": f"Buoy {n}", "text": f"It is {n} feet long. " * 12} for n in range(3)]
    items = [{"question": "How long is buoy 2?", "ctxs": passages}]
    (tmp_path / "questions.json").write_text(json.dumps(items))
    script = EXAMPLES / "measure_kv_dtypes.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), "questions.json", "--dtype", "bf16"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["bf16", "fp8", "int8", "int4"]
    assert [float(rows[0][n]) for n in (1, 3, 5)] == [1, 0, 0]
    assert float(rows[3][1]) < float(rows[2][1]) < 1  # smaller than bf16, header and all
    kl = {row[0]: float(row[4]) for row in rows}  # at 0.16
    assert abs(kl["int8"] - kl["bf16"]) <= 0.01


def test_the_cost_of_a_trace_is_measured_for_any_model(tmp_path: Path) -> None:
    script = str(EXAMPLES / "measure_trace.py")
    done = subprocess.run(
        [sys.executable, script, str(add_model(tmp_path, "tiny")), "--tokens=200", "--pairs=1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(",")[0] for line in lines[::2]] == ["question", "value"]
    assert all(" 200 tokens, 1 pairs" in line for line in lines[::2])
    assert all(line.strip().startswith("written in ") for line in lines[1::2])


@pytest.mark.model
def test_any_order_runs_from_the_python_api(default_model_dir: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "any_order.py"
    done = subprocess.run(
        [sys.executable, str(script), str(default_model_dir), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["warm-up", "first", "second", "third"]
    cached, recomputed = [int(row[5]) for row in rows], [int(row[6]) for row in rows]
    assert cached[0] == recomputed[0] == 0
    assert cached[1] == cached[2] == cached[3] > 2000
    assert all(0.15 < r / c < 0.17 for r, c in zip(recomputed[1:], cached[1:], strict=True))


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells it there")
@pytest.mark.parametrize("loader", ["pipelined", "prefetch"])
def test_a_blend_takes_the_memory_of_one_kv_cache(default_model_dir: Path, loader: str) -> None:
    script = EXAMPLES / "measure_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), str(default_model_dir), "--json", "--loader", loader],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["cached_tokens"] == 4040
    assert facts["share"] <= 1.3
    # The KV cache and what some layers need, but neither a second one nor a copy of the weights.
    assert facts["loaded"] <= 0.6 * facts["weights"]
    assert facts["peak"] - facts["loaded"] <= 2 * facts["kv"]


def test_tiers_are_measured_for_any_model(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    model, remote = add_model(tmp_path, "tiny"), (tmp_path / "shared").as_uri()
    script = str(EXAMPLES / "measure_tiers.py")
    done = subprocess.run(
        [sys.executable, script, str(model), remote, "--chunks=1", "--rounds=1"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stderr
    tiers = [line.split()[-1] for line in done.stdout.splitlines()[1:]]
    assert tiers == ["none", "disk", "memory", "remote"]
