"""Evaluation: readers, metrics, arms, intervals, the runner against what must hold, its file."""

import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import NotFoundError, UsageError
from engine import BlendOptions, Engine, SamplingOptions
from engine.bench.layout import temporary_store
from engine.compare import agreement, reference
from engine.evaluation import (
    Arm,
    Passage,
    Question,
    evaluate,
    plan_arms,
    prepare,
    read_questions,
    summarise,
)
from engine.evaluation import metrics as metrics_module
from engine.evaluation.metrics import choose_metric, f1, first_line, normalised, rouge_l, score
from engine.evaluation.questions import digest
from engine.evaluation.report import ArmRow
from engine.evaluation.runner import ArmResult, QuestionResult, check, prompt_of
from engine.evaluation.runner import steps as steps_of
from engine.evaluation.state import StateFile
from engine.evaluation.statistics import Bootstrap
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
RATIOS = tuple(map(Decimal, ("0", "0.1", "0.3", "1")))
TEXTS = (
    "The night watch writes every reading of the boiler into the blue book.",
    "Keys are kept at the gate; the second key lies in the office on the first floor.",
    "Visitors sign in, and they sign out again before the lights go off at six.",
    "The pilot boat leaves at six, and the tide turns twice a day.",
)


def question(number: int) -> Question:
    turned = [*TEXTS[number % 4 :], *TEXTS[: number % 4]]
    passages = tuple(Passage(f"{text} Note {number}.", f"doc{i}") for i, text in enumerate(turned))
    return Question(f"q{number}", f"Where are the keys, asks number {number}?", passages, ("gate",))


QUESTIONS = tuple(question(number) for number in range(3))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("evaluation") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 1024}), folder)
    write_tokenizer(folder, "sentencepiece")  # one that has a BOS token
    return Engine.load(folder, device="cpu", dtype="fp32")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def written(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
    return path


# Readers

PASSAGES = {
    "question": "Who signs?",
    "ctxs": [{"title": "Desk", "text": "Orla signs."}, {"title": "", "text": "Or Ben."}],
    "answers": ["Orla", "Orla K."],
    "more": 1,
}
PROMPT = {"0": "\n\nfirst", "1": "second", "query": "\n\nQuestion: who?\nAnswer:", "chunk_num": 2}
CHUNKS = {"id": "q7", "question": "Who?", "chunks": ["Orla signs.", {"text": "x", "source": "a"}]}


def test_passages_in_a_list(tmp_path: Path) -> None:
    found = read_questions([written(tmp_path / "set.json", [PASSAGES, PASSAGES])])
    assert [q.name for q in found] == ["set.json:1", "set.json:2"]
    assert found[0].text == "Who signs?"
    assert found[0].answers == ("Orla", "Orla K.")
    assert found[0].passages == (Passage("Desk\nOrla signs.", "Desk"), Passage("Or Ben.", None))


def test_single_prompts_of_several_files_with_other_forms(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "1.json", PROMPT),
        written(tmp_path / "2.json", json.dumps(PROMPT, indent=2)),
        written(
            tmp_path / "3.jsonl", "\ufeff" + json.dumps(CHUNKS) + "\n\n" + json.dumps(PASSAGES)
        ),
    ]
    found = read_questions(files)
    assert [q.name for q in found] == ["1.json", "2.json", "q7", "3.jsonl:3"]
    assert found[0].passages == (Passage("\n\nfirst"), Passage("second"))
    assert found[0].text.strip() == "Question: who?\nAnswer:"
    assert found[0].answers == ()
    assert found[2].passages == (Passage("Orla signs."), Passage("x", "a"))
    assert [q.answers for q in found[2:]] == [(), ("Orla", "Orla K.")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"question": "a", "chunks": ["b"]}\nnonsense', "line 2: not JSON"),
        ("[]", "no question in it"),
        ("[" * 100_000, "nested too deeply"),
        ([PASSAGES, 3], "item 2 is a number"),
        ([{"question": "who"}], "item 1 has no ctxs, chunks or query"),
        ([{**PASSAGES, "question": None}], "item 1: question is missing"),
        ([{**PASSAGES, "question": " "}], "item 1: question is empty"),
        ([{**PASSAGES, "ctxs": {}}], "item 1: ctxs is an object"),
        ([{**PASSAGES, "ctxs": []}], "item 1: ctxs is empty"),
        ([{**PASSAGES, "ctxs": ["x"]}], "item 1: ctxs 1 is a text"),
        ([{**PASSAGES, "ctxs": [{"title": 1, "text": "x"}]}], "ctxs 1: title is a number"),
        ([{**PASSAGES, "ctxs": [{"title": "x"}]}], "item 1: ctxs 1: text is missing"),
        ([{**PASSAGES, "answers": [1]}], "item 1: answers 1 is a number"),
        ([{**PASSAGES, "answers": {}}], "item 1: answers is an object"),
        ({**PROMPT, "chunk_num": "2"}, "chunk_num is a text"),
        ({**PROMPT, "chunk_num": 0}, "chunk_num is a number, 0"),
        ({**PROMPT, "chunk_num": 3}, "2 is missing"),
        ({**PROMPT, "chunk_num": 1}, "there is a passage 1"),
        ({**PROMPT, "query": 7}, "query is a number"),
        ({**CHUNKS, "chunk": 1}, "unknown key 'chunk'"),
        ({**CHUNKS, "id": [1]}, "id is a list"),
        (
            {**CHUNKS, "chunks": [{"text": "a", "sauce": "b"}]},
            "chunks 1 has the unknown key 'sauce'",
        ),
        ({**CHUNKS, "chunks": [{"text": "a", "source": 1}]}, "chunks 1: source is a number"),
        ({**CHUNKS, "chunks": ["a", ""]}, "chunks 2: text is empty"),
        ({**CHUNKS, "chunks": [4]}, "chunks 1 is a number"),
    ],
)
def test_what_is_malformed_is_named_in_one_line(tmp_path: Path, value: Any, message: str) -> None:
    path = written(tmp_path / "set.json", value)
    with pytest.raises(UsageError) as caught:
        read_questions([path])
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_file_that_fails_while_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, *_: object) -> str:
        raise OSError(5, "Input/output error")

    path = written(tmp_path / "set.json", [])
    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(UsageError, match=r"set\.json: Input/output error"):
        read_questions([path])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_questions([tmp_path / "none.json"])
    with pytest.raises(UsageError, match="is a folder"):
        read_questions([tmp_path])
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_questions([tmp_path / "latin.json"])


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation data is not here")
def test_the_published_data_is_read() -> None:
    found = read_questions([DATA / "musique_dev.json"])
    assert (len(found), {len(q.passages) for q in found}) == (50, {10})
    assert choose_metric(found) == "f1"
    files = sorted(DATA.glob("blend_*.json"))
    prompts = read_questions(files)
    counts = [json.loads(path.read_text("utf-8"))["chunk_num"] for path in files]
    assert [len(q.passages) for q in prompts] == counts
    assert choose_metric(prompts) is None


# Preparing


def test_passages_are_cut_and_shuffled_the_same_whatever_the_limit() -> None:
    everything = prepare(QUESTIONS, passages=3, shuffle=7)
    assert prepare(QUESTIONS, limit=2, passages=3, shuffle=7) == everything[:2]
    for before, after in zip(QUESTIONS, everything, strict=True):
        assert set(after.passages) == set(before.passages[:3])
    assert any(a.passages != b.passages[:3] for a, b in zip(everything, QUESTIONS, strict=True))
    assert prepare(QUESTIONS, shuffle=8) != prepare(QUESTIONS, shuffle=7)
    assert prepare(QUESTIONS) == QUESTIONS
    with pytest.raises(UsageError, match="q0 has 4 passages"):
        prepare(QUESTIONS, passages=5)


def test_the_digest_is_of_all_that_counts() -> None:
    (one,) = read_questions_of(CHUNKS)
    assert digest([one]) == digest([replace(one, name="other")])
    others = [
        replace(one, text="Whom?"),
        replace(one, answers=("Orla",)),
        replace(one, passages=one.passages[::-1]),
        replace(one, passages=(Passage("Orla signs.x"), Passage(""))),
    ]
    assert len({digest([q]) for q in (one, *others)}) == 5


def read_questions_of(value: Any) -> tuple[Question, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return read_questions([written(Path(folder) / "x.json", value)])


# Metrics


def test_answers_are_compared_as_squad_does() -> None:
    assert normalised("The  Cat, a dog; AN ant!") == "cat dog ant"
    assert normalised("theatre, anthem") == "theatre anthem"
    assert f1("The cat sat.", "a cat sat") == 1
    assert f1("cat cat dog", "cat bird") == pytest.approx(2 * 1 / 5)
    assert f1("dog", "cat") == 0
    assert (f1("the", ""), f1("the", "cat"), f1("", "cat")) == (1, 0, 0)


def test_the_first_line_is_scored_against_the_best_answer() -> None:
    assert first_line("\n  six \nand more") == "six"
    assert score("f1", "\nat six o'clock\nThe tide", ("seven", "six")) == pytest.approx(0.5)


@pytest.mark.skipif(importlib.util.find_spec("rouge_score") is None, reason="no rouge-score")
def test_rouge_l() -> None:
    # The longest common subsequence is "police kill gunman" against "police ... gunman": 2 words
    assert rouge_l("police kill the gunman", "police killed the gunman") == 1  # stemmed
    assert rouge_l("the gunman kill police", "police kill the gunman") == pytest.approx(0.5)
    assert score("rouge-l", "nothing alike", ("police", "gunman")) == 0


def test_the_metric_fits_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = Question("s", "Dialogue: A: hi\nB: hello\nSummary: ", (Passage("x"),), ("A greets",))
    assert choose_metric(QUESTIONS) == "f1"
    assert choose_metric([summary, summary, *QUESTIONS[:1]]) == "rouge-l"
    assert choose_metric([summary], "f1") == "f1"
    assert choose_metric([replace(summary, answers=())]) is None
    with pytest.raises(UsageError, match="unknown"):
        choose_metric([summary], "bleu")
    with pytest.raises(UsageError, match="no question has answers"):
        choose_metric([replace(summary, answers=())], "f1")
    monkeypatch.setattr(metrics_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="rouge-score") as caught:
        choose_metric([summary])
    assert "cacheblend[eval]" in caught.value.hint


# Arms


def named(arms: Sequence[Arm]) -> list[tuple[Any, ...]]:
    return [(arm.mode, arm.policy, arm.ratio, arm.check_layers) for arm in arms]


def test_every_arm_is_there_once_and_random_beside() -> None:
    assert named(plan_arms(policies=("value",), ratios=RATIOS, check_layers=(1, 2))) == [
        ("full", None, None, None),
        ("reuse", None, 0, None),
        ("blend", "value", 0.1, (1,)),
        ("blend", "value", 0.3, (1,)),
        ("blend", "value", 0.1, (2,)),
        ("blend", "value", 0.3, (2,)),
        ("blend", "random", 0.1, None),
        ("blend", "random", 0.3, None),
        ("blend", None, 1, None),
    ]
    same = plan_arms(policies=("random", "key"), ratios=(Decimal("0.10"), Decimal("0.1")))
    assert [arm.policy for arm in same] == [None, None, "random", "key"]
    alone = plan_arms(policies=("key",), ratios=RATIOS, random=False, modes=("prefix",))
    assert [arm.mode for arm in alone] == ["full", "reuse", "prefix"]


def test_every_context_has_its_own_reuse_but_shares_the_ends() -> None:
    arms = plan_arms(policies=("value",), ratios=RATIOS, contexts=("none", "prefix"), random=False)
    assert [(arm.context, arm.mode, arm.ratio) for arm in arms] == [
        ("none", "full", None),
        *(("none", "reuse", 0), ("none", "blend", 0.1), ("none", "blend", 0.3)),
        *(("prefix", "reuse", 0), ("prefix", "blend", 0.1), ("prefix", "blend", 0.3)),
        ("none", "blend", 1),
    ]


def test_one_context_is_all_that_chunks_are_computed_behind() -> None:
    """The ends too: full prefill and ratio 1 must not have chunks computed that nobody reads."""
    arms = plan_arms(policies=("value",), ratios=RATIOS, contexts=("none",))
    assert {arm.context for arm in arms} == {"none"}


def test_arms_are_told_apart_by_their_keys() -> None:
    arms = plan_arms(
        policies=("value", "key"),
        ratios=RATIOS,
        check_layers=(1, 2),
        contexts=("prefix", "bos"),
        seed=3,
    )
    assert len({arm.key for arm in arms}) == len(arms)
    exact = Arm(BlendOptions.of(ratio="0.10")), Arm(BlendOptions.of(ratio="0.1"))
    assert exact[0].key == exact[1].key


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"policies": ("explicit",)}, "explicit"),
        ({"policies": ("best",)}, "unknown"),
        ({"modes": ("fast",)}, "unknown"),
        ({"contexts": ("system",)}, "unknown"),
        ({"check_layers": (0,)}, "check layer 0"),
    ],
)
def test_arms_that_cannot_be(named: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_arms(**{"policies": ("value",), "ratios": RATIOS, **named})


# Intervals


def test_intervals_are_the_same_in_every_run_and_hold_the_figure() -> None:
    values = [0.1, 0.4, 0.2, 0.9, 0.05, 0.3]
    estimate = Bootstrap(6).mean(values)
    assert estimate == Bootstrap(6).mean(values)
    assert estimate.low is not None
    assert estimate.high is not None
    assert min(values) < estimate.low < estimate.value < estimate.high < max(values)
    assert estimate.value == pytest.approx(sum(values) / 6)
    one = Bootstrap(1).mean([0.5])
    assert (one.value, one.low, one.high) == (0.5, None, None)


def test_recovery_is_paired() -> None:
    """Questions differ tenfold; an arm that halves each of them recovers half, for sure."""
    reuse = [0.1, 1.0, 0.3, 0.7]
    found = Bootstrap(4).recovery([value / 2 for value in reuse], reuse)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert Bootstrap(2).recovery([0.0, 0.0], [0.0, 0.0]) is None


# Running


def without_times(results: Sequence[QuestionResult]) -> list[QuestionResult]:
    return [
        replace(r, full_ttft_s=0, arms=tuple(replace(arm, ttft_s=0) for arm in r.arms))
        for r in results
    ]


def rows_of(arms: Sequence[Arm], results: Sequence[QuestionResult]) -> dict[Any, ArmRow]:
    return {(r.mode, r.policy, r.ratio): r for r in summarise(arms, results)}


@pytest.fixture(scope="module")
def arms() -> tuple[Arm, ...]:
    return plan_arms(policies=("value",), ratios=RATIOS, modes=("blend", "prefix"))


def test_the_ends_are_exact_and_recovery_is_of_reuse(
    engine: Engine, arms: tuple[Arm, ...], temporary: Path
) -> None:
    steps: list[str] = []
    results = list(evaluate(engine, QUESTIONS, arms, metric="f1", on_step=steps.append))
    assert len(steps) == len(QUESTIONS) * steps_of(arms)
    rows = rows_of(arms, results)
    full, reuse, everything = (
        rows["full", None, None],
        rows["reuse", None, 0],
        rows["blend", None, 1],
    )
    assert full.kl < 1e-9
    assert everything.kl < 1e-9
    assert (everything.same, everything.recomputed, everything.differs_at) == (1, 1, None)
    assert reuse.kl > 1e-6
    assert (reuse.recovery, reuse.recomputed) == (0, 0)
    assert everything.recovery == pytest.approx(1, abs=1e-3)
    blend = rows["blend", "value", 0.3]
    assert blend.recovery == pytest.approx(1 - blend.kl / reuse.kl)
    assert blend.recomputed == pytest.approx(0.3, abs=0.02)
    assert blend.kl_low is not None
    assert blend.kl_high is not None
    assert blend.kl_low <= blend.kl <= blend.kl_high
    assert rows["prefix", None, None].kl < 1e-6  # computes all but what is exact
    assert full.speedup == 1
    assert all(row.scored == 3 and row.score is not None for row in rows.values())
    assert everything.score == full.score
    assert list(temporary.iterdir()) == []  # each question's store is gone


def test_an_arm_is_what_the_comparison_says(engine: Engine, arms: tuple[Arm, ...]) -> None:
    (result,) = evaluate(engine, QUESTIONS[:1], arms[:3], tokens=5)
    prompt = prompt_of(engine.blueprint, QUESTIONS[0])
    full = reference(engine.model, prompt.token_ids, engine.end_ids, tokens=5)
    assert result.forced == len(full.tokens) <= 5
    assert result.tokens == len(prompt.token_ids)
    run = engine.prefill(prompt, BlendOptions.of(mode="full"), room=5)
    same = agreement(engine.model, run.cache, run.tables, run.logits, full)
    assert result.arms[0].kl == pytest.approx(same.kl_mean, abs=1e-9)
    assert result.arms[0].top1 == same.top1 == 1
    assert all(arm.answer is None and arm.score is None for arm in result.arms)


def test_the_same_call_gives_the_same_results(engine: Engine, arms: tuple[Arm, ...]) -> None:
    once, again = (list(evaluate(engine, QUESTIONS, arms, metric="f1")) for _ in range(2))
    assert without_times(once) == without_times(again)
    later = list(evaluate(engine, QUESTIONS, arms, metric="f1", first=2))
    assert without_times(later) == without_times(once[2:])
    # nor does it matter which arms are beside
    alone = list(evaluate(engine, QUESTIONS, arms[2:3], metric="f1"))
    assert [r.arms[0] for r in without_times(alone)] == [r.arms[2] for r in without_times(once)]


def test_chunks_are_computed_behind_the_context(engine: Engine) -> None:
    contexts = ("prefix", "bos", "none")
    arms = plan_arms(policies=(), ratios=RATIOS[:1], contexts=contexts)
    results = list(evaluate(engine, QUESTIONS, arms))
    rows = {row.context: row for row in summarise(arms, results) if row.mode == "reuse"}
    assert len({row.kl for row in rows.values()}) == 3
    assert {context: row.recovery for context, row in rows.items()} == dict.fromkeys(contexts, 0)
    # Behind nothing the first chunk is not exact, and can be selected too.
    half = plan_arms(policies=("random",), ratios=(Decimal("0.9"),), contexts=("prefix", "none"))
    (result,) = evaluate(engine, QUESTIONS[:1], half)
    chosen = {arm.context: one for arm, one in zip(half, result.arms, strict=True)}
    assert chosen["prefix"].recomputed < chosen["none"].recomputed


@pytest.mark.parametrize(("tokens", "longest"), [(1, 6), (4, 4), (4, 20), (16, 6), (16, 20)])
def test_answers_are_those_that_ask_gives(engine: Engine, tokens: int, longest: int) -> None:
    """However much of them the comparison has shown already, and where they part or not."""
    arms = plan_arms(policies=(), ratios=())
    (result,) = evaluate(
        engine, QUESTIONS[1:2], arms, tokens=tokens, metric="f1", max_tokens=longest
    )
    with temporary_store(engine.blueprint, result.tokens) as store:
        over = Engine(engine.model, engine.blueprint, store=store)
        chunks = [over.chunk(passage.text) for passage in QUESTIONS[1].passages]
        over.precompute(chunks)
        asked = [
            over.ask(
                QUESTIONS[1].text,
                chunks,
                blend=BlendOptions.of(mode=mode),
                sampling=SamplingOptions(max_tokens=longest),
            ).answer
            for mode in ("full", "reuse")
        ]
    assert result.arms[1].differs_at == (None if tokens == 1 else 2)
    assert [arm.answer for arm in result.arms] == asked


def test_what_the_model_cannot_do_is_refused_before(engine: Engine) -> None:
    deep = plan_arms(policies=("value",), ratios=RATIOS, check_layers=(9,))
    with pytest.raises(UsageError, match="check layer 9"):
        check(engine.blueprint, QUESTIONS, deep)
    long = replace(QUESTIONS[1], passages=QUESTIONS[1].passages * 40)
    with pytest.raises(UsageError, match="q1 makes a prompt of"):
        check(engine.blueprint, [QUESTIONS[0], long], plan_arms(policies=(), ratios=()))


# The file


@pytest.fixture
def results() -> list[QuestionResult]:
    one = ArmResult(0.1, 0.02, 0.01, 0.9, 3, 10, 100, "six", 1.0)
    return [QuestionResult(n, f"q{n}", 200, 16, 0.5, (one, one)) for n in range(3)]


SETTINGS = {"model": "m", "ratios": "0,1", "passages": None, "arms": ["a", "b"]}


def filled(path: Path, results: Sequence[QuestionResult]) -> None:
    with StateFile(path, SETTINGS) as file:
        for result in results:
            file.append(result)


def test_results_come_back(tmp_path: Path, results: list[QuestionResult]) -> None:
    path = tmp_path / "state.jsonl"
    filled(path, results[:2])
    with StateFile(path, SETTINGS) as file:
        assert list(file.results) == results[:2]
        file.append(results[2])
        with pytest.raises(UsageError, match="another run"):
            StateFile(path, SETTINGS)
    with StateFile(path, SETTINGS) as file:
        assert list(file.results) == results


@pytest.mark.parametrize("cut", [1, 20, 200, "header"])
def test_half_a_line_is_dropped(
    tmp_path: Path, results: list[QuestionResult], cut: int | str
) -> None:
    path = tmp_path / "state.jsonl"
    filled(path, results)
    data = path.read_bytes()
    path.write_bytes(data[:15] if cut == "header" else data[: -int(cut)])
    with StateFile(path, SETTINGS) as file:
        kept = list(file.results)
        assert kept == ([] if cut == "header" else results[:2])
        for result in results[len(kept) :]:
            file.append(result)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "n"}, "made with model m, now it is n"),
        ({"passages": 4}, "made with passages none, now it is 4"),
        ({"arms": ["a"]}, "made with arms a,b, now it is a"),
        ({"new": 1}, "made with new none, now it is 1"),
    ],
)
def test_other_settings_are_refused_and_named(
    tmp_path: Path, results: list[QuestionResult], change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "state.jsonl"
    filled(path, results)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        StateFile(path, SETTINGS | change)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda lines: [b"notes\n"], "holds something else"),
        (lambda lines: [b'{"question": 1}\n', *lines], "holds something else"),
        (lambda lines: [lines[0], b"{}\n", *lines[1:]], "line 2 is not"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 is not"),
        (lambda lines: [*lines, b"nonsense\n"], "line 5 is not"),
        (lambda lines: [lines[0], lines[1].replace(b"0.02", b"NaN"), *lines[2:]], "line 2 is not"),
        (lambda lines: [lines[0], lines[1].replace(b"0.02", b'"x"'), *lines[2:]], "line 2 is not"),
    ],
)
def test_a_file_that_is_none_of_ours_is_left_alone(
    tmp_path: Path,
    results: list[QuestionResult],
    harm: Callable[[list[bytes]], list[bytes]],
    message: str,
) -> None:
    path = tmp_path / "state.jsonl"
    filled(path, results)
    path.write_bytes(b"".join(harm(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        StateFile(path, SETTINGS)
    assert path.read_bytes() == before
