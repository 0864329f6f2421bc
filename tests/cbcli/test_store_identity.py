"""What never hits what was stored before, and what hits and is told from exact KV."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli.world import CHATML, World, add_model, make_world
from tests.engine.tiny_tokenizers import write_tokenizer

TEXTS = ("The pilot boat leaves at six.", "Wet ropes are hung, never stowed.")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    for number, text in enumerate(TEXTS):
        (world.root / f"{number}.txt").write_text(text)
        assert world("ingest", f"{number}.txt").exit_code == 0
    return world


def statuses(world: World, *args: str, texts: tuple[str, ...] = TEXTS) -> list[Any]:
    """Status and reason of each chunk of a prompt over these texts; nothing is stored."""
    line = {"question": "When does it leave?", "chunks": [{"text": text} for text in texts]}
    Path("in.jsonl").write_text(json.dumps(line) + "\n")
    result = world("run", "in.jsonl", "--no-save", *args)
    assert result.exit_code == 0, result.stderr
    segments = json.loads(result.stdout)["prompt"]["segments"]
    return [(s["status"], s["reason"]) for s in segments if s["kind"] == "chunk"]


def other_weights(world: World) -> tuple[str, ...]:
    shutil.rmtree(world.root / "home/models/tiny")
    add_model(world.root, "tiny", seed=9)
    return ()


def other_model(world: World) -> tuple[str, ...]:
    add_model(world.root, "deeper", num_hidden_layers=5)
    return ("--model", "deeper")


def other_config(world: World) -> tuple[str, ...]:
    path = world.root / "home/models/tiny/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    return ()


def other_tokenizer(world: World) -> tuple[str, ...]:
    write_tokenizer(world.root / "home/models/tiny", "byte_level_nfkc", chat_template=CHATML)
    return ()


CHANGES: dict[str, Callable[[World], tuple[str, ...]]] = {
    "other weights, same name": other_weights,
    "other model": other_model,
    "other configuration": other_config,
    "other tokenizer, same ids": other_tokenizer,
    "computed in another dtype": lambda world: ("--dtype", "bf16"),
    "stored in another dtype": lambda world: ("--kv-dtype", "int8"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_never_hits(world: World, change: str) -> None:
    assert statuses(world) == [("exact", None), ("hit", None)]
    args = CHANGES[change](world)
    assert statuses(world, *args) == [("miss", "other_model")] * 2
    assert world("store", "verify").exit_code == 0  # what was stored is as it was


def test_another_text_never_hits_though_it_looks_the_same(world: World) -> None:
    changed = (TEXTS[0] + " ", TEXTS[1].replace("never", "Never"))
    assert statuses(world, texts=changed) == [("miss", "absent")] * 2


def test_a_document_ingested_again_loses_what_it_was(world: World) -> None:
    Path("0.txt").write_text("The pilot boat leaves at seven.")
    assert "dropped 1 chunk" in world("ingest", "0.txt").stdout
    assert statuses(world) == [("miss", "absent"), ("hit", None)]


def test_another_prefix_hits_and_is_never_exact(world: World) -> None:
    system = ("--system", "Answer as a gull.")
    assert statuses(world, *system) == [("hit", None)] * 2
    assert statuses(world, *system, "--strict-context") == [("miss", "context")] * 2
    assert statuses(world, "--strict-context") == [("exact", None), ("hit", None)]
