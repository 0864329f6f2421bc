"""What commands that load a model import on the way, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli.world import World, make_world

# Each of them takes from a fifth of a second to several before the first token.
UNWANTED = (
    *("transformers", "gguf", "huggingface_hub", "sympy", "torch._dynamo", "torch._inductor"),
    *("matplotlib", "rich", "textual", "pandas", "numba", "jax", "vllm"),
    *("engine.bench", "engine.probe"),
    *("engine.calibration.gate", "engine.calibration.prompts", "engine.calibration.texts"),
)
CODE = """
import gc, json, sys
from cbcli.main import main
try:
    main()
except SystemExit as done:
    facts = {"code": done.code, "modules": sorted(sys.modules), "collections": gc.get_stats()}
    print(json.dumps(facts), file=sys.stderr)
"""
QUESTION = "When does the tide turn?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def started(world: World, *args: str) -> dict[str, Any]:
    """Runs a command; how it ended and what it had imported by then."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *args],
        capture_output=True,
        text=True,
        env={
            **environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CACHEBLEND_HOME": str(world.root / "home"),
            "CACHEBLEND_MODEL": "tiny",
            "CACHEBLEND_DTYPE": "fp32",
            "CACHEBLEND_LIMIT": "500MB",
            "CACHEBLEND_MAX_TOKENS": "3",
            "CACHEBLEND_MIN_TOKENS": "0",
        },
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert facts["code"] == 0, done.stderr
    return facts


def test_nothing_that_is_not_needed_is_imported(world: World) -> None:
    (world.root / "prompts.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    for args in (("ingest", "docs"), ("ask", QUESTION), ("run", "prompts.jsonl")):
        facts = started(world, *args)
        assert "torch" in facts["modules"]
        assert [name for name in UNWANTED if name in facts["modules"]] == [], args
        # Of all objects, which are many by then and hardly any of them garbage.
        assert facts["collections"][2]["collections"] == 0, args


def test_a_search_needs_no_model(world: World) -> None:
    started(world, "ingest", "docs")
    facts = started(world, "search", QUESTION)
    unwanted = ("torch", "tokenizers", "safetensors", "model2vec", "tqdm", *UNWANTED)
    assert [name for name in unwanted if name in facts["modules"]] == []
