"""`cacheblend ask`: choosing chunks, modes, output, and everything that can be wrong with it."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from cbcli.commands.ask import parse_indices
from cbcli.settings import LOADERS, POLICIES
from engine.loaders import LOADER_NAMES
from engine.policies import POLICY_NAMES
from tests.cbcli.terminal import run
from tests.cbcli.world import World, add_model, make_world

QUESTION = "Who keeps the log of every boat?"


def chunk_ids(result) -> list[str]:
    return [s["chunk_id"] for s in result["prompt"]["segments"] if s["kind"] == "chunk"]


def test_retrieved_chunks_come_best_first(world: World) -> None:
    result = world.json("ask", QUESTION, "--top-k", "2")
    found = chunk_ids(result)
    assert len(found) == 2
    assert "log" in world.json("store", "show", found[0])["text"]
    assert result["timing"]["retrieve_s"] > 0
    assert result["timing"]["load_model_s"] > 0


def test_chunks_by_id_in_the_order_given(world: World) -> None:
    ids = [c["chunk_id"] for c in world.chunks()]
    wanted = [ids[3], ids[0], ids[2]]
    args = [f"--chunk={name[:9]}" for name in wanted]
    result = world.json("ask", QUESTION, *args)
    assert chunk_ids(result) == wanted
    statuses = [s["status"] for s in result["prompt"]["segments"] if s["kind"] == "chunk"]
    assert statuses == ["exact", "hit", "hit"]


def test_orders(world: World) -> None:
    ids = [c["chunk_id"] for c in world.chunks()]
    args = [f"--chunk={name}" for name in reversed(ids)]
    assert chunk_ids(world.json("ask", QUESTION, *args, "--order", "source")) == ids
    shuffled = [
        chunk_ids(world.json("ask", QUESTION, *args, "--order", "shuffle", "--seed", seed))
        for seed in ("1", "1", "2")
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == sorted(ids)
    scored = chunk_ids(world.json("ask", QUESTION, *args, "--order", "score"))
    assert sorted(scored) == sorted(ids)
    assert scored[0] == chunk_ids(world.json("ask", QUESTION, "--top-k", "1"))[0]


def test_a_chunk_has_the_same_ids_wherever_it_stands(world: World) -> None:
    """Tokenized once and alone: nothing is tokenized again where texts are joined."""
    ids = [c["chunk_id"] for c in world.chunks()]
    counts = {c["chunk_id"]: c["tokens"] for c in world.chunks()}
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in ids}
    for order in (ids, ids[::-1], ids[2:] + ids[:2]):
        result = world.json("ask", QUESTION, *[f"--chunk={name}" for name in order])
        for s in (s for s in result["prompt"]["segments"] if s["kind"] == "chunk"):
            seen[s["chunk_id"]].add(tuple(result["prompt"]["token_ids"][s["start"] : s["end"]]))
    assert {name: {len(t) for t in tokens} for name, tokens in seen.items()} == {
        name: {count} for name, count in counts.items()
    }
    assert all(len(tokens) == 1 for tokens in seen.values())


def test_question_on_standard_input(world: World) -> None:
    piped = world.json("ask", input=QUESTION + "\n")
    assert piped["prompt"]["token_ids"] == world.json("ask", QUESTION)["prompt"]["token_ids"]
    assert world.json("ask", "-", input=QUESTION)["answer"] == piped["answer"]


def test_human_output_is_the_answer_on_stdout_and_the_rest_on_stderr(world: World) -> None:
    result = world("ask", QUESTION)
    answer = world.json("ask", QUESTION)["answer"]
    assert result.stdout.strip() == answer.strip()
    assert "first token after" in result.stderr
    assert "cached tokens recomputed" in result.stderr
    assert world("ask", QUESTION, "-q").stderr == ""


def test_json_is_one_document_and_nothing_else(world: World) -> None:
    result = world("ask", QUESTION, "--json", "--compare", "-v")
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout)["compare"]["top1_agreement"] <= 1
    assert result.stderr == ""


def test_same_question_twice_is_the_same(world: World) -> None:
    one, two = (world.json("ask", QUESTION, "--ratio", "0.3") for _ in range(2))
    for timed in ("timing", "compare"):
        one.pop(timed)
        two.pop(timed)
    assert one == two


@pytest.mark.parametrize("mode", ["blend", "reuse", "full", "prefix"])
def test_modes(world: World, mode: str) -> None:
    result = world.json("ask", QUESTION, "--mode", mode, "--compare", "--top-k", "3")
    assert result["mode"] == mode
    if mode in ("full", "prefix"):
        assert result["compare"]["kl_mean"] < 1e-6
        assert result["compare"]["first_divergence"] is None
    if mode == "reuse":
        assert result["recomputed"]["tokens"] == 0


def test_ratio_ends(world: World) -> None:
    nothing = world.json("ask", QUESTION, "--ratio", "0")
    assert nothing["recomputed"]["tokens"] == 0
    everything = world.json("ask", QUESTION, "--ratio", "1", "--compare")
    assert everything["recomputed"]["fraction"] == 1
    assert everything["compare"]["kl_mean"] < 1e-6


def test_check_layers_and_ratios_together(world: World) -> None:
    args = ("--check-layer", "1", "--check-layer", "3", "--ratio", "0.5,0.2")
    result = world.json("ask", QUESTION, *args)
    assert result["check_layers"] == [1, 3]
    assert result["ratios"] == [0.5, 0.2]


def test_indices(world: World) -> None:
    first = world.json("ask", QUESTION, "--top-k", "3")
    segment = first["prompt"]["segments"][3]
    result = world.json(
        "ask", QUESTION, "--top-k", "3", "--indices", f"{segment['start']}-{segment['start'] + 4}"
    )
    assert result["policy"] == "explicit"
    assert result["recomputed"]["tokens"] == 5
    assert parse_indices("4, 7-9,2") == [4, 7, 8, 9, 2]


def test_too_short_is_said(world: World) -> None:
    result = world.json("ask", QUESTION, "--min-tokens", "100000")
    assert "blending begins at 100000" in result["skipped_blend"]
    said = world("ask", QUESTION, "--min-tokens", "100000", "-v")
    assert "too short to blend" in said.stderr
    assert "tokens computed, as fewer than --min-tokens are cached" in said.stderr


def test_reasons_are_said_in_words(world: World) -> None:
    late = ("--policy", "value", "--check-layer", "2")
    said = world("ask", QUESTION, "-v", "--ratio", "0.9", *late).stderr
    for words in ("time: waiting for stored KV", "high ratio", "short prompt", "late check"):
        assert words in said


def test_misses_are_computed_saved_and_said(tmp_path: Path, monkeypatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs", "--chunk-tokens", "24")
    ids = [c["chunk_id"] for c in world.chunks()]
    monkeypatch.setenv("CACHEBLEND_SYSTEM", "Answer like a pilot.")
    args = [f"--chunk={name}" for name in ids[:3]]
    strict = world.json("ask", QUESTION, *args, "--strict-context", "--no-save")
    assert strict["prompt"]["segments"][1]["status"] == "miss"
    said = world("ask", QUESTION, *args, "--strict-context", "--no-save", "-v").stderr
    assert "misses: 3 chunks" in said
    near = world.json("ask", QUESTION, *args)  # another system prompt still hits
    assert [s["status"] for s in near["prompt"]["segments"] if s["kind"] == "chunk"] == ["hit"] * 3
    world.json("ask", QUESTION, *args, "--strict-context")  # saves
    again = world.json("ask", QUESTION, *args, "--strict-context")
    kinds = [s["status"] for s in again["prompt"]["segments"] if s["kind"] == "chunk"]
    assert kinds == ["exact", "hit", "hit"]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        ((QUESTION, "--ratio", "1.5"), 2, "ratio"),
        ((QUESTION, "--ratio", "-0.1"), 2, "ratio"),
        ((QUESTION, "--ratio", "lots"), 2, "ratio"),
        ((QUESTION, "--ratio", "nan"), 2, "ratio"),
        ((QUESTION, "--check-layer", "0"), 2, "layer"),
        ((QUESTION, "--policy", "value", "--check-layer", "99"), 2, "check layer 99"),
        ((QUESTION, "--check-layer", "x"), 2, "layer"),
        ((QUESTION, "--policy", "best"), 2, "policy"),
        ((QUESTION, "--mode", "fast"), 2, "mode"),
        ((QUESTION, "--loader", "magic"), 2, "loader"),
        ((QUESTION, "--order", "up"), 2, "order"),
        ((QUESTION, "--top-k", "0"), 2, "top"),
        ((QUESTION, "--max-tokens", "0"), 2, "max"),
        ((QUESTION, "--top-p", "0"), 2, "top"),
        ((QUESTION, "--indices", "1-"), 2, "indices"),
        ((QUESTION, "--indices", "5-2"), 2, "indices"),
        ((QUESTION, "--indices", "0"), 2, "position 0 is not a cached token"),
        ((QUESTION, "--indices", "40", "--policy", "key"), 2, "exclude"),
        ((QUESTION, "--chunk", "ffffffff"), 3, "ffffffff"),
        ((QUESTION, "--chunk", "not-an-id"), 2, "not-an-id"),
        ((QUESTION, "--model", "nobody"), 3, "nobody"),
        (("xylophone zebra",), 3, "no stored chunk"),
        (("   ",), 2, "empty"),
        ((QUESTION, "--nonsense"), 2, "nonsense"),
        (("word " * 3000,), 3, "no stored chunk"),
        (("boat " * 3000,), 2, "context of 2048"),
        ((QUESTION, "--store", "nowhere"), 3, "no store"),
    ],
)
def test_bad_input_is_one_line(world: World, args: tuple[str, ...], code: int, word: str) -> None:
    error = world.error("ask", *args, code=code)
    assert word in error["message"]
    assert not Path("nowhere").exists()


def test_ambiguous_chunk_prefix_is_refused(world: World, monkeypatch) -> None:
    error = world.error("ask", QUESTION, "--chunk", world.chunks()[0]["chunk_id"][:1], code=2)
    assert "chunk" in error["message"]


def test_no_question_at_a_terminal_is_an_error_not_a_prompt(world: World) -> None:
    assert world.error("ask", input="", code=2)["message"] == "the question is empty"


def test_damaged_entry_is_said_and_answered_anyway(tmp_path: Path, monkeypatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs", "--chunk-tokens", "24")
    good = world.json("ask", QUESTION, "--mode", "full")
    for path in (tmp_path / "home/store/kv").rglob("*.kv"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 255
        path.write_bytes(raw)
    assert world("store", "verify").exit_code == 4
    result = world("ask", QUESTION, "--json")
    assert result.exit_code == 0
    asked = json.loads(result.stdout)
    assert asked["answer"] == good["answer"]
    warnings = [json.loads(line)["warning"]["message"] for line in result.stderr.splitlines()]
    assert warnings
    assert all("computed instead" in warning for warning in warnings)
    # Saved anew after the answer, so the next one hits again.
    assert world.json("ask", QUESTION)["prompt"]["segments"][1]["status"] == "exact"


def test_names_of_the_settings_are_the_engines() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)
    assert LOADERS == LOADER_NAMES


def test_loaders_give_the_same_answer(world: World) -> None:
    results = [world.json("ask", QUESTION, "--loader", name, "--ratio", "0.3") for name in LOADERS]
    for result in results:
        timing = result.pop("timing")
        assert len(timing["layers"]) == 4
        assert timing["kv_load_s"] > 0
    assert all(result == results[0] for result in results)


@pytest.mark.model
def test_the_default_model_end_to_end(default_model_dir: Path, tmp_path: Path, monkeypatch) -> None:
    examples = Path(__file__).parents[2] / "examples" / "docs"
    documents = sorted(str(path) for path in examples.iterdir())[:3]
    env = {
        "CACHEBLEND_MODELS_DIR": str(default_model_dir.parent),
        "CACHEBLEND_STORE": str(tmp_path / "store"),
        "CACHEBLEND_LIMIT": "1GB",
    }
    monkeypatch.chdir(tmp_path)
    done = run("ingest", *documents, "--json", env=env)
    assert done.exit_code == 0, done.stderr
    asked = run("ask", "What is this about?", "--top-k", "3", "-n", "8", "--compare", "--json",
                "--policy", "value", env=env)  # fmt: skip
    result = json.loads(asked.stdout)
    assert result["model"]["name"] == "smollm2-135m"
    assert result["skipped_blend"] is None
    assert result["recomputed"]["fraction"] == pytest.approx(0.16, abs=0.01)
    assert result["compare"]["kl_mean"] < 0.5


def test_a_failed_save_does_not_lose_the_answer(world: World, monkeypatch) -> None:
    def full(*args: object, **named: object) -> None:
        raise CacheblendError("no space left on the disk")

    monkeypatch.setattr("cache_store.space.Space.reserve", full)
    result = world("ask", QUESTION, "--strict-context", "--system", "Be a gull.", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["answer"]
    warning = json.loads(result.stderr)["warning"]["message"]
    assert "not every new chunk was stored: no space left" in warning


def test_a_store_full_of_ingested_chunks_answers_and_says_what_it_refused(
    tmp_path: Path, monkeypatch
) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs")
    with ChunkStore.open(world.root / "home" / "store") as store:
        before = {entry.key for entry in store.entries()}
        store.set_eviction("none")
        store.set_limit(2 * store.used_bytes() + 4 * 2**20)
        room = store.limit - store._space._counted(anew=True)
        (store.path / "kv" / "foreign").write_bytes(b"x" * room)
    result = world("ask", QUESTION, "--strict-context", "--system", "Be a gull.", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["answer"]
    warning = json.loads(result.stderr)["warning"]["message"]
    assert "not every new chunk was stored" in warning
    assert "is full" in warning
    with ChunkStore.open(world.root / "home" / "store") as store:
        assert {entry.key for entry in store.entries()} == before


def test_what_a_prompt_saves_is_marked_until_it_is_ingested(tmp_path: Path, monkeypatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs")
    world.json("ask", QUESTION, "--strict-context", "--system", "Be a gull.")
    with ChunkStore.open(world.root / "home" / "store") as store:
        saved = store.stats().saved_entries
        assert 0 < saved < store.stats().entries
    world.json("ingest", "docs", "--system", "Be a gull.")
    with ChunkStore.open(world.root / "home" / "store") as store:
        assert store.stats().saved_entries == 0


def test_kv_evicted_since_is_computed_again(tmp_path: Path, monkeypatch) -> None:
    """Another model's KV for the chunk is there, and this model was here before: a plain miss."""
    world = make_world(tmp_path, monkeypatch)
    add_model(world.root, "other", seed=5)
    world.json("ingest", "docs")
    world.json("ingest", "docs", model="other")
    chunk = world.chunks()[0]["chunk_id"]
    with ChunkStore.open(world.root / "home" / "store") as store:
        other = store.catalog.model_name
        for entry in list(store.entries()):
            if entry.chunk_id == chunk and other(entry.spec.model) == "other":
                store.discard(entry.key)
    result = world.json("ask", QUESTION, "--chunk", chunk, model="other")
    assert result["prompt"]["segments"][1]["status"] == "miss"
    again = world.json("ask", QUESTION, "--chunk", chunk, model="other")
    assert again["prompt"]["segments"][1]["status"] == "exact"


def test_text_altered_in_the_catalog_is_not_answered_from(tmp_path: Path, monkeypatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs")
    with sqlite3.connect(tmp_path / "home/store/catalog.db") as catalog:
        catalog.execute(
            "UPDATE chunk SET text = 'The log is on the moon.' WHERE source LIKE '%one%'"
        )
    assert world("store", "verify").exit_code == 4
    error = world.error("ask", "Who is on the moon with the log?", "--top-k", "1", code=4)
    assert "altered" in error["message"]
    world.json("ingest", "docs")  # mends it
    assert world("store", "verify").exit_code == 0
    assert world.json("ask", QUESTION)["answer"]


def test_a_closed_stdout_is_a_failure_and_no_bug(world: World) -> None:
    code = "import sys; sys.stdout = None; sys.argv = ['cacheblend', 'config', 'path']; "
    code += "from cbcli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output is closed")
    assert len(done.stderr.splitlines()) == 1
