"""`cacheblend store estimate`, as its user sees it."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import diskprobe
from engine import probe as probing
from tests.cbcli.terminal import run
from tests.cbcli.world import World, make_world

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield make_world(tmp_path_factory.mktemp("world"), patch)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.chdir(world.root)
    monkeypatch.setattr(probing, "ENOUGH", 0.0)
    monkeypatch.setattr(probing, "FEWEST", 1)
    monkeypatch.setattr(diskprobe, "FILES", 2)


@pytest.fixture(scope="module")
def mistral(world: World) -> str:
    path = world.root / "mistral.json"
    path.write_text(json.dumps(MISTRAL))
    return str(path)


def estimate(world: World, *args: str, **options: Any) -> Any:
    return world.json("store", "estimate", *args, **options)


def test_mistral_7b_without_its_weights(world: World, mistral: str) -> None:
    found = estimate(world, "--config", mistral, "--dtype", "bf16", "--no-probe")
    assert found["kv"]["chunk_tokens"] == 512
    assert found["kv"]["chunk_bytes"] == 67_108_864
    assert found["probe"] is None
    assert found["first_token"] == []
    shown = world("store", "estimate", "--config", mistral, "--dtype", "bf16", "--no-probe")
    assert "512 tokens, 67.1 MB" in shown.stdout
    assert "bf16 on cpu" in shown.stdout
    assert "for want of its tokenizer" in shown.stdout


def test_documents_count_as_ingest_would_cut_them(world: World) -> None:
    planned = world.json("ingest", "--dry-run", "docs", "--chunk-tokens", "20")
    found = estimate(world, "docs", "--chunk-tokens", "20", "--no-probe")["material"]
    distinct = {chunk["chunk_id"]: chunk["tokens"] for chunk in planned["chunks"]}
    assert found["origin"] == "paths"
    assert (found["documents"], found["chunks"]) == (3, len(distinct))
    assert found["tokens"] == planned["tokens"] == sum(distinct.values())
    assert found["bytes"] > planned["bytes"]  # index rows, blocks and the prefix come on top


def test_the_bytes_are_those_that_ingest_counts(world: World) -> None:
    store = ["--store", str(world.root / "counted")]
    planned = estimate(world, "docs", *store, "--no-probe")["material"]
    assert not (world.root / "counted").exists()
    assert world.json("ingest", "docs", *store)["bytes_written"] == planned["bytes"]
    held = estimate(world, *store, "--no-probe")["material"]
    assert held["origin"] == "store"
    for name in ("documents", "chunks", "tokens", "bytes"):
        assert held[name] == planned[name]


def test_so_many_tokens(world: World) -> None:
    found = estimate(world, "--tokens", "1000", "--chunk-tokens", "300", "--no-probe")
    assert found["material"]["tokens"] == 1000
    assert found["material"]["chunks"] == 4
    one = estimate(world, "--tokens", "300", "--chunk-tokens", "300", "--no-probe")
    assert found["material"]["bytes"] > 3 * one["kv"]["entry_bytes"]


def test_without_documents_or_a_store_a_chunk_is_told(world: World) -> None:
    found = estimate(world, "--store", str(world.root / "none"), "--no-probe")
    assert found["material"]["origin"] == ""
    assert found["kv"]["entry_bytes"] > found["kv"]["chunk_bytes"] > 0
    assert not (world.root / "none").exists()


def test_times_for_every_way(world: World) -> None:
    found = estimate(world, "docs", "-r", "0.5,0.16", "--top-k", "2", "--chunk-tokens", "40")
    assert [way["way"] for way in found["first_token"]] == [
        "full prefill",
        "blend 0.5",
        "blend 0.16",
        "reuse",
    ]
    for way in found["first_token"]:
        assert way["ttft_s"] > 0
        parts = ("compute_s", "place_s", "read_warm_s", "other_s")
        assert way["ttft_s"] == pytest.approx(sum(way[part] for part in parts))
        assert way["speedup"] == found["first_token"][0]["ttft_s"] / way["ttft_s"]
    assert found["prompt"]["chunks"] == 2
    assert found["prompt"]["load_warm_s"] > 0
    assert found["material"]["ingest_s"] > 0
    assert found["prompt"]["decode_tokens_s"] > 0
    assert found["probe"]["shape"]["chunks"] == 2
    assert not (world.root / "home" / "store").exists()


def test_ratio_auto_is_estimated_with_the_usual_one(world: World) -> None:
    """A settings file may say auto, which takes a calibration and a prompt to be a number."""
    file = world.root / "cacheblend.toml"
    file.write_text('ratio = "auto"\n')
    try:
        found = estimate(world, "--tokens", "1000")
    finally:
        file.unlink()
    assert [way["way"] for way in found["first_token"]] == ["full prefill", "blend 0.16", "reuse"]
    assert any("auto" in said for said in found["assumed"])


def test_the_table_has_the_same_ways(world: World) -> None:
    shown = world("store", "estimate", "docs", "--top-k", "2", "--chunk-tokens", "40")
    assert shown.exit_code == 0, shown.stderr
    for word in ("full prefill", "blend 0.16", "reuse", "ingest", "loading it", "assumed:"):
        assert word in shown.stdout
    assert shown.stderr == ""


def test_a_prompt_has_no_more_chunks_than_the_context_takes(world: World) -> None:
    found = estimate(world, "--tokens", "9000", "--top-k", "50", "--no-probe")
    assert found["prompt"]["chunks"] == 3
    assert found["prompt"]["tokens"] < 2048
    assert "no more fit the context of 2,048 tokens" in " ".join(found["assumed"])
    few = estimate(world, "--tokens", "500", "--top-k", "50", "--no-probe")
    assert few["prompt"]["chunks"] == 1
    assert "no more fit" not in " ".join(few["assumed"])


def test_fewer_tokens_than_are_blended_are_said(world: World) -> None:
    env = {"CACHEBLEND_HOME": str(world.root / "home"), "CACHEBLEND_MODEL": "tiny"}
    told = run("store", "estimate", "--tokens", "200", "--no-probe", env=env)
    assert "200 cached tokens are fewer than the setting min_tokens (256)" in told.stdout
    told = run("store", "estimate", "--tokens", "300", "--no-probe", env=env)
    assert "min_tokens" not in told.stdout


def test_what_does_not_fit_the_limit_is_said(world: World) -> None:
    shown = world("store", "estimate", "--tokens", "10000000", "--no-probe")
    assert shown.exit_code == 0
    assert "do not fit the store's limit of 500 MB" in shown.stderr


def test_a_model_folder_without_a_tokenizer_is_known_by_its_shape(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    found = estimate(world, "--no-probe", model=str(tmp_path))
    assert found["kv"]["token_bytes"] == 2 * 131_072  # fp32, as this world's settings have it


def test_a_document_that_cannot_be_read_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone")
    (tmp_path / "good.txt").write_text("The tide turns twice a day.")
    shown = world("store", "estimate", str(tmp_path), "--no-probe")
    assert "broken.txt" in shown.stderr
    assert "1 document, 1 chunk" in shown.stdout


def test_a_folder_without_documents_is_said(world: World, tmp_path: Path) -> None:
    shown = world("store", "estimate", str(tmp_path), "--no-probe")
    assert shown.exit_code == 0
    assert "no text was found" in shown.stderr


@pytest.mark.parametrize(
    ("args", "code", "message", "hint"),
    [
        (["docs", "--tokens", "5"], 2, "documents and --tokens", "one of the two"),
        (["--config", "none.json"], 3, "none.json", "config.json"),
        (["--config", "docs/one.md"], 2, "not readable as JSON", ""),
        (["--config", "list.json"], 2, "a JSON object is expected", ""),
        (["--config", "gpt.json"], 2, "GPT2LMHeadModel is not supported", "supported: "),
        (["docs", "--config", "mistral.json"], 2, "no tokenizer", "--tokens"),
        (["--chunk-tokens", "2048"], 2, "does not fit tiny's context of 2048", "--chunk-tokens"),
        (["--model", "nothing-like-it"], 3, "no model", ""),
        (["nowhere.txt"], 3, "nowhere.txt", ""),
    ],
)
def test_what_cannot_be_estimated_is_refused(
    world: World, mistral: str, args: list[str], code: int, message: str, hint: str
) -> None:
    (world.root / "list.json").write_text("[]")
    (world.root / "gpt.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    error = world.error("store", "estimate", "--no-probe", *args, code=code)
    assert message in error["message"]
    assert hint in error["hint"]
