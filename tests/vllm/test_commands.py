"""The commands with `--engine vllm`: what they print is what the torch engine prints."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_store.store import ChunkStore
from engine.api import Engine
from engine.blueprint import Blueprint
from engine.options import BlendOptions, SamplingOptions
from tests.cbcli.terminal import run
from tests.cbcli.world import CHATML, TEXTS, World
from tests.engine.tiny_models import build
from tests.engine.tiny_tokenizers import write_tokenizer
from tests.vllm.worlds import TINY

LINES = [
    {"id": 0, "policy": "value"},
    {"id": 1, "policy": "question", "ratio": 0.3},
    {"id": 2, "mode": "full"},
    {"id": 3, "ratio": 1},
    {"id": 4, "ratio": "auto"},
    {"id": 5, "mode": "reuse", "chunks": ["A rope that nobody has stored yet, coiled twice."]},
    {"id": 6, "mode": "prefix"},
    {"id": 7, "policy": "random", "ratio": 0.5, "seed": 3},
]


class VllmWorld(World):
    def __call__(self, *args: str, input: str | None = None, model: str = "tiny") -> Any:
        env = {
            "CACHEBLEND_HOME": str(self.root / "home"),
            "CACHEBLEND_MODEL": model,
            "CACHEBLEND_DTYPE": "fp32",
            "CACHEBLEND_MIN_TOKENS": "0",
            "CACHEBLEND_LIMIT": "500MB",
            "CACHEBLEND_MAX_TOKENS": "5",
            "CACHEBLEND_CHUNK_TOKENS": "48",
        }
        return run(*args, input=input, env=env)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as the commands have it by themselves
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A store that was filled with `ingest --engine vllm`."""
    root = tmp_path_factory.mktemp("world")
    folder = root / "home" / "models" / "tiny"
    build(TINY["llama"], folder, 0)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_tokenizer(folder, chat_template=CHATML, config=config)
    made = VllmWorld(root)
    for name, text in TEXTS.items():
        path = made.docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    report = made.json("ingest", str(made.docs), "--engine", "vllm")
    assert report["chunks"]["computed"] > 2, report
    return made


def records(world: World, engine: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked = [{"question": "When does the pilot boat leave?"} | line for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in asked)
    result = world("run", "-", "--engine", engine, "--no-save", input=text)
    assert result.exit_code == (1 if engine == "vllm" else result.exit_code), result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_chunks_of_vllm_are_the_torch_engines_too(world: World) -> None:
    report = world.json("ingest", str(world.docs), "--engine", "torch")
    assert report["chunks"]["computed"] == 0, report


def test_several_lines_at_once_are_answered_as_by_the_torch_engine(world: World) -> None:
    ours, torchs = (records(world, engine, LINES) for engine in ("vllm", "torch"))
    assert [one["id"] for one in ours] == list(range(len(LINES)))
    assert ours[4]["error"]["kind"] == "usage"
    for number in (0, 1, 2, 3, 5, 6, 7):
        one, other = ours[number], torchs[number]
        assert list(one) == list(other), number
        assert (one["engine"], other["engine"]) == ("vllm", "torch")
        for key in ("mode", "policy", "ratios", "check_layers", "skipped_blend", "recomputed"):
            assert one[key] == other[key], (number, key)
        assert set(one["timing"]) == set(other["timing"])
        assert one["timing"]["ttft_s"] > 0
        segments = [[(s["kind"], s["start"], s["reason"]) for s in x["prompt"]["segments"]]
                    for x in (one, other)]  # fmt: skip
        assert segments[0] == segments[1]
        chunks = [[s["status"] for s in x["prompt"]["segments"] if s["kind"] == "chunk"]
                  for x in (one, other)]  # fmt: skip
        assert chunks[0] == chunks[1], number
        assert one["output_token_ids"] == other["output_token_ids"], number
        logprobs = dict(other["first_token"]["top_logprobs"])
        assert one["first_token"]["top_logprobs"][0][1] == pytest.approx(
            logprobs[one["first_token"]["id"]], abs=1e-3
        )
    assert ours[5]["prompt"]["segments"][1]["status"] == "miss"
    assert ours[1]["kv"]["bytes_loaded"] == torchs[1]["kv"]["bytes_loaded"] > 0


def test_ask_compares_audits_and_records(world: World, tmp_path: Path) -> None:
    trace = tmp_path / "run.cbtrace"
    result = world(
        *("ask", "When does the pilot boat leave?", "--engine", "vllm", "--json", "--compare"),
        *("--audit", "1", "--trace", str(trace), "--trace-level", "full", "-r", "0.2"),
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    answered = json.loads(result.stdout)
    assert answered["compare"]["kl_mean"] > 0
    assert answered["audit"]["kl_mean"] == answered["compare"]["kl_mean"]
    shown = world.json("inspect", str(trace))
    assert shown["result"]["engine"] == "vllm"
    assert shown["level"] == "full"
    assert len(shown["result"]["timing"]["layers"]) == 4


def test_at_ratio_1_nothing_is_approximate(world: World) -> None:
    asked = world.json(
        *("ask", "Who keeps the log?", "--engine", "vllm", "--compare", "-r", "1"),
        *("--vllm", "max_num_batched_tokens=128"),
    )
    assert asked["compare"]["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert asked["compare"]["top1_agreement"] == 1
    assert asked["compare"]["answer"] == asked["answer"]


def test_what_is_asked_wrongly_is_said_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("ask", "When does the pilot boat leave?", "--engine", "vllm")
    for flags, said in (
        (("--live",), "--live"),
        (("--vllm", "seed=1"), "cacheblend sets it"),
        (("--vllm", "max_num_seqs"), "KEY=VALUE"),
        (("--ratio", "auto"), "--ratio auto"),
        (("--device", "mps"), ""),
        (("--vllm", "no_such_thing=1"), "no such argument"),
    ):
        assert said in world.error(*asked, *flags, code=2)["message"], flags
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    error = world.error(*asked, "--vllm", "kv_cache_memory_bytes=1000", code=1)
    assert "vLLM did not start" in error["message"]


def test_eval_and_bench_measure_it(world: World, tmp_path: Path) -> None:
    passages = [{"title": f"p{i}", "text": text} for i, text in enumerate(TEXTS.values())]
    question = {"question": "Who is paid?", "answers": ["The keeper"], "ctxs": passages}
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(question) + "\n")
    report = world.json(
        *("eval", str(file), "--engine", "vllm", "--ratios", "0.2,1", "--policies", "value"),
        *("--tokens", "4", "-n", "4"),
    )
    assert report["engine"] == "vllm"
    rows = {(row["mode"], row["ratio"]): row for row in report["rows"]}
    assert rows["full", None]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows["blend", 1.0]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows["reuse", 0.0]["kl"] > 1e-9
    report = world.json(
        *("bench", "ttft", "--engine", "vllm", "--tokens", "400", "--pairs", "1"),
        *("--ratios", "0.16", "--policies", "value,explicit"),
    )
    assert report["engine"] == "vllm"
    assert [row["way"] for row in report["rows"]] == ["full", "reuse", "blend", "blend"]
    assert all(row["median_s"] > 0 for row in report["rows"])


@pytest.fixture(scope="module")
def engines(world: World) -> Iterator[tuple[Any, Engine]]:
    """vLLM and torch over the same store."""
    from engine.vllm.local import VllmEngine
    from engine.vllm.start import LocalSettings

    blueprint = Blueprint.open(world.root / "home" / "models" / "tiny", dtype="fp32")
    with ChunkStore.open(world.root / "home" / "store") as store:
        settings = LocalSettings(longest=800)
        with VllmEngine.load(blueprint, store=store, settings=settings) as ours:
            yield ours, Engine.load(blueprint, store=store)


CASES: list[dict[str, Any]] = [
    dict(policy="value"),
    dict(policy="question", ratio="0.3"),
    dict(policy="value", threshold="0.5"),
    dict(policy="key", ratio=("0.5", "0.2"), check_layers=(1, 2)),
    dict(policy="hybrid", transfer=True, loader="sync"),
    dict(policy="attention", strict_context=True),
    dict(mode="reuse"),
    dict(mode="prefix"),
    dict(mode="full"),
    dict(ratio=1),
    dict(min_tokens=100_000),
]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_the_same_positions_and_answers(
    engines: tuple[Any, Engine], world: World, given: dict[str, Any]
) -> None:
    pieces: list[str] = []
    options = BlendOptions.of(**{"min_tokens": 0, **given})
    ours, torchs = (
        engine.ask(
            "Where are ropes hung?",
            [engine.chunk(text) for text in sorted(TEXTS.values())] * 2,
            blend=options,
            sampling=SamplingOptions(max_tokens=8),
            save=False,
            on_text=pieces.append if engine.name == "vllm" else None,
        )
        for engine in engines
    )
    assert ours.selected == torchs.selected
    assert ours.recomputed == torchs.recomputed
    assert ours.skipped_blend == torchs.skipped_blend
    assert ours.output_token_ids == torchs.output_token_ids
    assert ours.answer == torchs.answer == "".join(pieces)
    assert [s.status for s in ours.prompt.segments if s.kind == "chunk"] == [
        s.status for s in torchs.prompt.segments if s.kind == "chunk"
    ]


def test_stop_texts_sampling_and_positions(engines: tuple[Any, Engine]) -> None:
    ours, torchs = engines
    chunks = [ours.chunk(text) for text in TEXTS.values()]
    full = BlendOptions.of(mode="full")
    plain = torchs.ask("Who?", chunks, blend=full, sampling=SamplingOptions(max_tokens=12))
    stop = next(text for text in (plain.answer[3:5], plain.answer[1:2]) if text)
    sampling = SamplingOptions(max_tokens=12, stop=(stop,))
    both = [engine.ask("Who?", chunks, blend=full, sampling=sampling) for engine in engines]
    assert both[0].answer == both[1].answer
    assert both[0].finish_reason == both[1].finish_reason == "stop"
    drawn = SamplingOptions(max_tokens=8, temperature=1.5, seed=5, top_k=50)
    first, again = (ours.ask("Who?", chunks, blend=full, sampling=drawn) for _ in range(2))
    assert first.output_token_ids == again.output_token_ids
    other = ours.ask("Who?", chunks, blend=full, sampling=replace(drawn, seed=6))
    assert other.output_token_ids != first.output_token_ids
    with pytest.raises(Exception, match="position 0 is not a cached token"):
        ours.ask("Who?", chunks, blend=BlendOptions.of(policy="explicit", indices=[0]))


def test_what_missed_is_stored_after_the_answer(engines: tuple[Any, Engine]) -> None:
    ours, torchs = engines
    text = "The bell is rung in fog, once a minute, and never at noon."
    blend = BlendOptions.of(min_tokens=0)
    found: Callable[[Any], str] = lambda result: result.prompt.segments[1].status  # noqa: E731
    short = SamplingOptions(max_tokens=2)
    first = ours.ask("When?", [ours.chunk(text)], blend=blend, sampling=short)
    assert (found(first), first.prompt.segments[1].reason) == ("miss", "absent")
    again = torchs.ask("When?", [ours.chunk(text)], blend=blend, sampling=short)
    assert found(again) == "exact"
