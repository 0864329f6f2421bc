"""The probe of a machine, on tiny shapes: what it gives, and that it leaves nothing behind."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.errors import CacheblendError
from engine import diskprobe
from engine import probe as probing
from engine.config import ModelConfig, parse_config
from engine.diskprobe import probe_disk
from engine.machine import this_machine
from engine.probe import Probe, probe
from engine.trial import PromptShape

CPU = torch.device("cpu")


def config(architecture: str = "LlamaForCausalLM", **other: Any) -> ModelConfig:
    raw = {
        "architectures": [architecture],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return parse_config(raw | other)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "ENOUGH", 0.0)
    monkeypatch.setattr(probing, "FEWEST", 1)
    monkeypatch.setattr(diskprobe, "FILES", 2)


def rates(found: Probe) -> list[float]:
    tables = [r.flops for r in (*found.linear, *found.scattered, found.causal)]
    return [*tables, found.place_bytes_s, found.weight_bytes_s]


@pytest.mark.parametrize(
    "shape",
    [
        config(),
        config("Qwen2ForCausalLM"),
        config("Qwen3ForCausalLM", head_dim=16, attention_bias=True),
        config("MistralForCausalLM", sliding_window=100),
        config("SmolLM3ForCausalLM", num_hidden_layers=5),
        config("Gemma3ForCausalLM", head_dim=16, sliding_window=50),
        config("Phi3ForCausalLM", partial_rotary_factor=0.5, head_dim=8),
        config(num_hidden_layers=1, mlp_bias=True, attention_bias=True),
        config(max_position_embeddings=200),
    ],
    ids=lambda c: f"{c.architecture}-{c.layers}-{c.max_positions}",
)
def test_every_architecture_is_measured_without_weights(tmp_path: Path, shape: ModelConfig) -> None:
    found = probe(shape, CPU, "fp32", tmp_path / "store")
    assert all(0 < rate < float("inf") for rate in rates(found))
    assert [r.tokens for r in found.linear] == sorted(r.tokens for r in found.linear)
    assert found.causal.tokens == found.tokens < shape.context
    assert found.shape.tokens <= found.tokens
    assert [(t.layers, float(t.ratio)) for t in found.trials][-1] == (
        (1, 0.0) if shape.layers == 1 else (shape.layers, 0.16)
    )
    assert all(t.seconds > 0 for t in found.trials)
    assert found.notes == ((found.disk.note,) if found.disk.note else ())  # as in a tmpfs
    assert json.loads(json.dumps(found.to_json()))["threads"] == torch.get_num_threads()


def test_nothing_is_made_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    there = tmp_path / "data"
    there.mkdir()
    found = probe(config(), CPU, "fp32", there / "not" / "made")
    assert found.disk.folder == str(there)
    assert list(there.iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_the_prompt_asked_for_is_the_one_that_is_tried(tmp_path: Path) -> None:
    shape = PromptShape(prefix=5, chunks=3, chunk_tokens=40, separator=2, suffix=7)
    found = probe(config(), CPU, "fp32", tmp_path, shape=shape)
    assert (found.shape, found.tokens) == (shape, shape.tokens)


def test_threads_are_set_for_the_probe(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert probe(config(), CPU, "fp32", tmp_path, threads=1).threads == 1
    finally:
        torch.set_num_threads(before)


def test_a_model_whose_layer_does_not_fit_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(this_machine(), available=1000)
    monkeypatch.setattr(probing, "this_machine", lambda: short)
    with pytest.raises(CacheblendError, match=r"1000 bytes of memory are free") as caught:
        probe(config(), CPU, "fp32", tmp_path)
    assert "--no-probe" in caught.value.hint


def test_no_place_for_trials_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    found = probe(config(), CPU, "fp32", tmp_path)
    assert found.trials == ()
    assert "no prompt could be tried" in " ".join(found.notes)
    assert found.disk.write is not None


def test_a_place_that_cannot_be_written_is_named_and_another_measured(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    found = probe_disk(file / "store")
    assert found.folder == tempfile.gettempdir()
    assert found.write is not None
    assert found.warm is not None
    assert f"{file / 'store'}: " in found.note
    assert "instead" in found.note


def test_no_place_at_all_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    found = probe_disk(file)
    assert (found.write, found.cold, found.warm) == (None, None, None)
    assert found.note


def test_files_that_stay_in_memory_give_no_disk_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskprobe, "_is_cached", lambda file: True)
    found = probe_disk(tmp_path)
    assert found.cold is None
    assert found.warm is not None
    assert "page cache kept" in found.note
