"""What a run leaves behind: every policy and mode, against the run's own result and figures that
come another way."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache_store.errors import IntegrityError, UsageError
from cache_store.store import ChunkStore
from engine.api import Engine
from engine.options import BlendOptions, SamplingOptions
from engine.policies import select
from engine.results import AskResult
from engine.tokenizer import Tokenizer
from engine.trace import Trace, measure, recorder
from engine.trace.file import from_bytes, to_bytes
from engine.trace.measure import measured_layers
from engine.trace.record import Stage
from engine.trace.recording import _floats
from tests.engine.test_template import CHATML
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import SENTENCES, write_tokenizer
from tests.engine.trace.test_file import plain

TEXTS = ("The tide turns twice a day.", "The pilot boat leaves at six. 🎉", "The lamp burns oil.")
LAYERS = 4


def load(folder: Path, layers: int = LAYERS, **tokenizer: Any) -> Engine:
    shape = {"vocab_size": 1000, "max_position_embeddings": 2048, "num_hidden_layers": layers}
    build(Tiny("tiny", "Llama", shape), folder)
    template = None if tokenizer else CHATML
    write_tokenizer(folder, chat_template=template, **tokenizer)
    return Engine.load(folder, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(tmp_path_factory.mktemp("models") / "tiny")


def stored(model: Engine, path: Path, texts: Sequence[str] = TEXTS) -> Iterator[Engine]:
    with ChunkStore.open(path / "store", limit_bytes=10**9) as store:
        engine = Engine(model.model, model.blueprint, store=store)
        engine.precompute([engine.chunk(text) for text in texts])
        yield engine


@pytest.fixture
def engine(model: Engine, tmp_path: Path) -> Iterator[Engine]:
    yield from stored(model, tmp_path)


def ask(engine: Engine, texts: Sequence[str] = (TEXTS[0], TEXTS[2], TEXTS[1]), **options: Any):
    named = {"trace": "full", "sampling": SamplingOptions(max_tokens=4)}
    named |= {
        k: options.pop(k) for k in ("compare", "save", "trace", "trace_layers") if k in options
    }
    if options.get("policy") == "explicit":
        prompt = engine.prompt("When?", [engine.chunk(text) for text in texts])
        first, second = [s for s in prompt.segments if s.kind == "chunk"][:2]
        options["indices"] = [first.start, second.start + 1, second.end - 1]  # one of them exact
    blend = BlendOptions.of(**{"min_tokens": 0, "ratio": "0.3", **options})
    chunks = [engine.chunk(text, f"{i}.md") for i, text in enumerate(texts)]
    return engine.ask("When?", chunks, blend=blend, **named)


def trace_of(result: AskResult) -> Trace:
    """The trace, as it comes back from a file."""
    assert result.trace is not None, result.notes
    assert plain(result.trace.result) == plain(result.to_json())
    found = from_bytes(to_bytes(result.trace), "it")
    whole, back = plain(result.trace), plain(found)
    for rounded in ("attention",):
        a, b = whole.pop(rounded), back.pop(rounded)
        if a is not None:
            np.testing.assert_allclose(a[1], b[1], rtol=1e-3, atol=1e-6)
    assert whole == back
    return found


RUNS: dict[str, dict[str, Any]] = {
    "question": {},
    "question of some layers": {"policy": "question:layers=1-2,weight=none"},
    "question by threshold": {"ratio": "0", "threshold": "0.5"},
    "question, two layers": {"check_layers": (1, 2), "ratio": ("0.5", "0.2")},
    "all, then none": {"check_layers": (1, 2), "ratio": ("1", "0")},
    "value": {"policy": "value"},
    "value, three layers": {
        "policy": "value",
        "check_layers": (1, 2, 3),
        "ratio": ("0.8", ".5", ".1"),
    },
    "key": {"policy": "key", "check_layers": 2},
    "key+value": {"policy": "key+value"},
    "attention": {"policy": "attention"},
    "first-k": {"policy": "first-k:k=3"},
    "hybrid": {"policy": "hybrid"},
    "random": {"policy": "random", "seed": 3},
    "explicit": {"policy": "explicit"},
    "ratio 0": {"ratio": "0"},
    "ratio 1": {"ratio": "1"},
    "reuse": {"mode": "reuse"},
    "full": {"mode": "full"},
    "prefix": {"mode": "prefix"},
    "skipped": {"min_tokens": 9999},
    "sync": {"loader": "sync"},
    "async": {"loader": "async", "policy": "value"},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_way_is_recorded(engine: Engine, name: str) -> None:
    result = ask(engine, compare=True, **RUNS[name])
    trace = trace_of(result)
    assert result.notes == ()
    assert trace.question == "When?"
    cached = np.zeros(len(trace.tokens.ids), bool)
    for segment in result.prompt.segments:
        if segment.kind == "chunk" and segment.status in ("hit", "exact"):
            cached[segment.start : segment.end] = True
        if segment.status in ("computed", "miss") or segment.kind == "suffix":
            assert (trace.tokens.computed[segment.start : segment.end] == LAYERS).all()
    # How many of the cached ones were computed at each layer.
    counts = [int((trace.tokens.computed[cached] > layer).sum()) for layer in range(LAYERS)]
    assert counts == list(result.recomputed.per_layer)
    if trace.stages:
        assert trace.stages[-1].selected().tolist() == list(result.selected)
        assert trace.stages[-1].chosen == result.recomputed.tokens
    if not trace.stages or trace.stages[-1].layer < LAYERS - 1:
        assert trace.selected.tolist() == list(result.selected)
    _times(trace, result)
    _compared(trace, result)
    approximate = cached.any() and name != "ratio 1"
    assert trace.reuse_ttft_s == (result.timing.ttft_s if name == "reuse" else None)
    assert trace.bound is not None
    assert trace.bound < 1 if approximate else trace.bound == 1
    assert (trace.deviations is not None) == bool(cached.any())
    if trace.deviations is not None:
        assert trace.deviations.layers == (1, 2, 3)
        assert trace.deviations.positions.tolist() == np.flatnonzero(cached).tolist()


def _times(trace: Trace, result: AskResult) -> None:
    timing = result.timing
    names = [phase.name for phase in trace.phases]
    assert names[:2] == ["tokenize", "find"]
    assert {"layers", "logits", "compare", "decode"} <= {*names}
    assert trace.phases[0].end_s == pytest.approx(0, abs=1e-12)
    assert trace.phases[0].start_s == pytest.approx(-timing.tokenize_s)
    ends = {phase.name: phase.end_s for phase in trace.phases}
    assert ends["logits"] == pytest.approx(timing.ttft_s)
    assert len(trace.spans) == LAYERS
    starts = [span.start_s for span in trace.spans]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert starts[-1] + trace.spans[-1].recompute_s <= ends["layers"] + 1e-9
    if timing.layers:
        assert [span.load_s for span in trace.spans] == [layer.load_s for layer in timing.layers]
        assert [span.stall_s for span in trace.spans] == [layer.stall_s for layer in timing.layers]
        assert sum(span.rotate_s for span in trace.spans) == pytest.approx(timing.rotate_s)
        assert sum(span.recompute_s for span in trace.spans) <= timing.recompute_s + 1e-9
        assert sum(span.score_s for span in trace.spans) <= timing.score_s + 1e-9
        assert all(span.load_s > 0 for span in trace.spans[1:])
    asked = [span.read_start_s is not None for span in trace.spans]
    assert any(asked) == ("read question" in names)
    if any(asked):
        reads = [span.read_start_s for span in trace.spans if span.read_start_s is not None]
        assert reads == sorted(reads)
        assert reads[-1] < starts[0]
    assert all(span.recompute_s > 0 for span in trace.spans)


def _compared(trace: Trace, result: AskResult) -> None:
    compare = result.compare
    assert compare is not None
    kl = [token.kl for token in trace.reference]
    assert None not in kl  # 4 tokens, of 16 that were compared
    assert kl[0] == pytest.approx(compare.kl_first)
    ids = [[t.id for t in tokens] for tokens in (trace.answer, trace.reference)]
    assert ids[0] == list(result.output_token_ids)
    apart = compare.first_divergence
    for index, token in enumerate(trace.answer):
        # After the first other token, this answer goes where nothing was measured.
        known = apart is None or index <= apart
        assert token.kl == (trace.reference[index].kl if known else None)


def test_scores_are_what_the_policy_saw(engine: Engine) -> None:
    """Deviation at a check layer is that from a full prefill: before it, all is computed."""
    for policy, layer in (("value", 1), ("value", 3), ("key", 2)):
        trace = trace_of(ask(engine, policy=policy, check_layers=layer))
        assert trace.deviations is not None
        (stage,) = trace.stages
        assert stage.layer == layer
        values = trace.deviations.v if policy == "value" else trace.deviations.k
        row = values[trace.deviations.layers.index(layer)]
        mine = np.isin(trace.deviations.positions, stage.positions)
        np.testing.assert_allclose(row[mine], stage.scores, rtol=1e-3, atol=1e-6)
        assert row[mine].max() > 1e-3
        # The first chunk stands where it was computed.
        np.testing.assert_allclose(values[:, ~mine], 0, atol=1e-6)
        assert (~mine).any()


def test_shares_of_the_question_add_up_to_its_score(engine: Engine) -> None:
    trace = trace_of(ask(engine))
    assert trace.attention is not None
    assert trace.attention_positions is not None
    assert trace.attention_layers == (1, 2, 3)
    np.testing.assert_allclose(trace.attention.sum(1), 1, atol=2e-3)
    (stage,) = trace.stages
    assert trace.attention_positions.tolist() == stage.positions.tolist()
    np.testing.assert_allclose(trace.attention.sum(0), stage.scores, rtol=5e-3, atol=1e-4)


def test_a_full_trace_measures_the_same_without_a_comparison(engine: Engine) -> None:
    one, other = (trace_of(ask(engine, compare=compare, trace_layers=[2])) for compare in (0, 1))
    assert one.deviations is not None
    assert other.deviations is not None
    assert one.deviations.layers == (2,)
    np.testing.assert_allclose(one.deviations.v, other.deviations.v, rtol=1e-5)
    assert one.reference == ()


def test_misses(engine: Engine) -> None:
    trace = trace_of(ask(engine, (*TEXTS, "A new one."), save=False))
    statuses = [s["status"] for s in trace.result["prompt"]["segments"] if s["kind"] == "chunk"]
    assert statuses == ["exact", "hit", "hit", "miss"]
    nothing = trace_of(ask(engine, ("Another one.", "And one more."), save=False))
    assert (nothing.tokens.computed == LAYERS)[-20:].all()
    assert nothing.stages == ()
    assert nothing.deviations is None


def test_no_chunk_and_an_empty_one(engine: Engine) -> None:
    assert len(trace_of(ask(engine, ())).result["prompt"]["segments"]) == 2
    assert len(trace_of(ask(engine, ("", TEXTS[1]))).result["prompt"]["segments"]) == 3


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    for engine in stored(load(tmp_path / "model", layers=1), tmp_path):
        for options in ({"policy": "random"}, {"mode": "reuse"}, {"mode": "full"}):
            trace = trace_of(ask(engine, compare=True, **options))
            assert trace.layers == len(trace.spans) == 1
            if trace.deviations is not None:
                assert trace.deviations.layers == (0,)
                np.testing.assert_allclose(trace.deviations.v, 0, atol=1e-9)


def test_a_basic_trace_measures_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "forward", None)
    assert trace_of(ask(engine, trace="basic")).deviations is None
    assert ask(engine, trace=None).trace is None


def test_a_trace_never_costs_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any) -> Any:
        raise IntegrityError("the entry is gone")

    monkeypatch.setattr(recorder, "deviations", gone)
    result = ask(engine)
    assert result.notes == ("the trace has no KV deviations: the entry is gone",)
    assert trace_of(result).deviations is None
    monkeypatch.setattr(recorder, "make_trace", lambda *args, **named: 1 / 0)
    result = ask(engine, trace="basic")
    assert result.trace is None
    assert result.answer is not None
    assert "was not recorded" in result.notes[0]


def test_scores_that_are_no_numbers_are_kept_as_they_were_taken() -> None:
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([1.0, -inf, nan, 3.0, inf, 2.0])
    taken = select(scores, 3).tolist()
    stage = Stage(1, np.arange(6, dtype=np.int32), _floats(scores), 3)
    assert np.isfinite(stage.scores).all()
    assert stage.selected().tolist() == taken == [2, 3, 4]


def test_layers_that_are_measured() -> None:
    assert measured_layers(1) == (0,)
    assert measured_layers(2) == (1,)
    assert measured_layers(30) == (1, 5, 9, 13, 17, 21, 25, 29)
    assert measured_layers(4, [3, 1, 3]) == (1, 3)
    with pytest.raises(UsageError, match="trace layer 4"):
        measured_layers(4, [1, 4])


def test_an_unknown_layer_is_refused_before_any_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "prefill", None)
    with pytest.raises(UsageError, match="trace layer 9"):
        ask(engine, trace_layers=[9])


CHUNKS = (
    *SENTENCES[:5],
    *(" leading space", "  two", "trailing ", "\n\tx", "a", "🎉👩‍👩‍👧"),
    "<|im_start|>user</s>[INST]",
)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace", "unigram"])
def test_tokens_spell_their_chunk(kind: str, tmp_path: Path) -> None:
    if kind == "byte_level":
        model = load(tmp_path / "model")
    else:
        model = load(tmp_path / "model", kind=kind)
    spelt = [text for text in CHUNKS if model.tokenizer.decode(model.tokenizer.encode(text))]
    if kind == "unigram":  # it has no bytes to spell what it doesn't know
        spelt = list(SENTENCES[:2])
    trace = trace_of(ask(model, spelt, trace="basic"))
    tokens, shown = trace.tokens, []
    for segment in trace.result["prompt"]["segments"]:
        first, last = tokens.span(segment["start"])[0], tokens.span(segment["end"] - 1)[1]
        if segment["kind"] == "chunk":
            shown.append(tokens.text[first:last].decode())
    assert shown == spelt


def test_control_tokens_show_their_name(engine: Engine) -> None:
    trace = trace_of(ask(engine, trace="basic"))
    assert trace.tokens.text.startswith(b"<|im_start|>system\n")
    assert trace.tokens.text.endswith(b"When?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_the_default_model(default_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    for text in CHUNKS:
        assert b"".join(tokenizer.pieces(tokenizer.encode(text))).decode() == text
    model = Engine.load(default_model_dir, dtype="bf16")
    for engine in stored(model, tmp_path):
        trace = trace_of(ask(engine, compare=True))
        assert trace.deviations is not None
        assert trace.deviations.layers == (1, 5, 9, 13, 17, 21, 25, 29)
        chunk = trace.result["prompt"]["segments"][1]
        exact = trace.deviations.positions < chunk["end"]
        assert trace.deviations.v[:, exact].mean() < 0.1 * trace.deviations.v[:, ~exact].mean()
        assert trace.bound is not None
        assert trace.bound < 0.9
