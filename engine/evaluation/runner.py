"""One question after the other, each in every arm."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.errors import UsageError
from cache_store.keys import chunk_id
from engine.api import Engine
from engine.base import BaseEngine
from engine.bench.layout import temporary_store
from engine.blueprint import Blueprint
from engine.compare import FORCED_TOKENS
from engine.context import CONTEXT_KINDS
from engine.evaluation.arms import Arm
from engine.evaluation.metrics import Metric, score
from engine.evaluation.questions import Question
from engine.evaluation.subject import Room, Subject, TorchSubject, Tried
from engine.options import BlendOptions
from engine.prompt import Prompt, PromptChunk, lay_out

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class ArmResult:
    """One question in one arm, against the full prefill of the same token ids.

    kl, kl_first, top1, differs_at: as `engine.compare.Agreement` has them. answer, score: None
    where no answer was made, or there is none to score it by. recomputed, cached: tokens.
    """

    ttft_s: float
    kl: float
    kl_first: float
    top1: float
    differs_at: int | None
    recomputed: int
    cached: int
    answer: str | None = None
    score: float | None = None


@dataclass(frozen=True)
class QuestionResult:
    """One question. number: its place, from 0; tokens: those of the prompt; forced: answer tokens
    compared; full_ttft_s: of a full prefill, warmed up; arms: in the order they were given."""

    number: int
    name: str
    tokens: int
    forced: int
    full_ttft_s: float
    arms: tuple[ArmResult, ...]


def evaluate(
    engine: BaseEngine,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    *,
    tokens: int = FORCED_TOKENS,
    metric: Metric | None = None,
    max_tokens: int = 32,
    first: int = 0,
    on_step: OnStep = lambda text: None,
) -> Iterator[QuestionResult]:
    """Results one by one, from the question numbered `first` on.

    A question's full prefill is computed once, its chunks are computed alone, behind the context of
    the arms, into a store of their own in the system's temporary folder, and every arm answers from
    there, in turn. The same call gives the same results but for the times.

    tokens: of full prefill's greedy answer, along which an arm is compared. metric: also lets every
    arm answer, up to max_tokens, and scores that where the question has answers. on_step is told
    what has been done, `steps` times a question. Raises UsageError as `check` does,
    CacheblendError for a full disk.
    """
    for number, question in enumerate(questions):
        if number >= first:
            runner = _Runner(engine, arms, tokens, metric, max_tokens, on_step)
            yield runner(number, question)


def steps(arms: Sequence[Arm]) -> int:
    """How often `on_step` is called for a question: for its full prefill, for storing its chunks
    behind each context, and for each arm."""
    return 1 + len({arm.context for arm in arms}) + len(arms)


def check(blueprint: Blueprint, questions: Sequence[Question], arms: Sequence[Arm]) -> None:
    """Raises UsageError for an arm the model cannot honour, and for a question whose prompt its
    context has no room for: before the weights are read."""
    for arm in arms:
        arm.options.check_model(blueprint.config.layers)
    for question in questions:
        length, context = len(prompt_of(blueprint, question).token_ids), blueprint.config.context
        if length >= context:
            raise UsageError(
                f"{question.name} makes a prompt of {length} tokens, which leaves no room in the "
                f"context of {context} that {blueprint.name} has",
                "use fewer passages (--passages), or leave the question out",
            )


def prompt_of(blueprint: Blueprint, question: Question) -> Prompt:
    """The question's passages, each encoded alone, in the model's own template."""
    encode, template = blueprint.tokenizer.encode, blueprint.template
    chunks = [
        PromptChunk(tuple(encode(p.text)), chunk_id(p.text), p.source) for p in question.passages
    ]
    return lay_out(template.prefix, chunks, template.separator, template.suffix(question.text))


def _in_turn(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Another arm begins with every question, so that none is always the first."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


@dataclass(frozen=True)
class _Runner:
    """What `evaluate` was given, for one question."""

    engine: BaseEngine
    arms: Sequence[Arm]
    tokens: int
    metric: Metric | None
    max_tokens: int
    on_step: OnStep

    def __call__(self, number: int, question: Question) -> QuestionResult:
        blueprint, subject = self.engine.blueprint, _subject(self.engine)
        prompt = prompt_of(blueprint, question)
        room = Room(self.tokens, None if self.metric is None else self.max_tokens)
        # It warms up the weights too: its own time does not count.
        full = subject.full(prompt, room)
        self.on_step(f"{question.name}: full prefill")
        results: dict[Arm, ArmResult] = {}
        for context in CONTEXT_KINDS:
            arms = [arm for arm in self.arms if arm.context == context]
            if not arms:
                continue
            with temporary_store(blueprint, len(prompt.token_ids)) as store:
                over = self.engine.over(store)
                chunks = [segment for segment in prompt.segments if segment.kind == "chunk"]
                behind = blueprint.template.context(context)
                over.writer(behind, prompt.prefix_ids).write_missing(chunks)
                over.prefill(prompt, BlendOptions.of(mode="reuse"), room.most)  # files into memory
                self.on_step(f"{question.name}: stored")
                for arm in _in_turn(arms, number):
                    tried = subject.compared(over, prompt, arm.options, full, room)
                    results[arm] = self._result(question, tried)
                    self.on_step(f"{question.name}: {arm.mode}")
        times = [results[arm].ttft_s for arm in self.arms if arm.mode == "full"]
        return QuestionResult(
            number,
            question.name,
            len(prompt.token_ids),
            len(full.tokens),
            times[0] if times else full.ttft_s,
            tuple(results[arm] for arm in self.arms),
        )

    def _result(self, question: Question, tried: Tried) -> ArmResult:
        run, same, answer, points = tried.run, tried.same, tried.answer, None
        if self.metric is not None and answer is not None and question.answers:
            points = score(self.metric, answer, question.answers)
        return ArmResult(
            run.ttft_s,
            same.kl_mean,
            same.kl_first,
            same.top1,
            same.differs_at,
            len(run.selected),
            run.cached_tokens,
            answer,
            points,
        )


def _subject(engine: BaseEngine) -> Subject[Any]:
    if isinstance(engine, Engine):
        return TorchSubject(engine)
    from engine.vllm.evaluation import VllmSubject
    from engine.vllm.local import VllmEngine

    assert isinstance(engine, VllmEngine)
    return VllmSubject(engine)
