"""What an evaluation returns: a row for every arm, and its documented JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from engine.bench.conditions import Conditions
from engine.context import ContextKind
from engine.evaluation.arms import Arm
from engine.evaluation.metrics import Metric
from engine.evaluation.runner import ArmResult, QuestionResult
from engine.evaluation.statistics import Bootstrap
from engine.results import ModelInfo


@dataclass(frozen=True)
class ArmRow:
    """One arm over all questions; KL in nats, times in seconds; low and high: a 95% interval.

    recovery: 1 - KL / KL of reuse with the same context. same: share of questions along whose
    forced tokens the arm's greedy answer is full prefill's; differs_at: median index of the first
    token that differs, in the others. score: F1 or ROUGE-L. speedup: full prefill's TTFT over the
    arm's, the median over questions. recomputed: share of the cached tokens.
    """

    mode: str
    policy: str | None
    ratio: float | None
    check_layers: tuple[int, ...] | None
    context: ContextKind
    questions: int
    kl: float
    kl_low: float | None
    kl_high: float | None
    kl_median: float
    kl_first: float
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    top1: float
    same: float
    differs_at: float | None
    score: float | None
    score_low: float | None
    score_high: float | None
    scored: int
    ttft_s: float
    speedup: float
    recomputed: float


@dataclass(frozen=True)
class Data:
    """The questions. digest: of all that was read; questions: how many were evaluated; passages:
    the fewest and the most of a question; shuffle: the seed, or None; tokens: a prompt's mean
    length."""

    files: tuple[str, ...]
    digest: str
    questions: int
    passages: tuple[int, int]
    shuffle: int | None
    tokens: float


@dataclass(frozen=True)
class Report:
    """forced_tokens: at most so many of a question; metric: None where nothing was scored."""

    model: ModelInfo
    conditions: Conditions
    data: Data
    forced_tokens: int
    metric: Metric | None
    max_tokens: int | None
    rows: tuple[ArmRow, ...]
    engine: str = "torch"

    def to_json(self) -> dict[str, Any]:
        """Schema 1: plain dicts, lists, numbers and strings, unrounded."""
        return {"schema": 1, **asdict(self)}


def curves(rows: Sequence[ArmRow]) -> list[tuple[ArmRow, ...]]:
    """For each policy, with its check layers and context, the rows by rising ratio: reuse as its
    ratio 0 and, where it was evaluated, the one that recomputes everything as its 1."""
    lines: dict[tuple[object, ...], list[ArmRow]] = {}
    for row in rows:
        if row.policy is not None:
            lines.setdefault((row.policy, row.check_layers, row.context), []).append(row)
    for (_, _, context), line in lines.items():
        for row in rows:
            everything = row.mode == "blend" and row.policy is None
            if everything or (row.mode == "reuse" and row.context == context):
                line.append(row)
    return [tuple(sorted(line, key=lambda row: row.ratio or 0.0)) for line in lines.values()]


def summarise(arms: Sequence[Arm], results: Sequence[QuestionResult]) -> tuple[ArmRow, ...]:
    """A row for every arm, in their order; none without results.

    recovery needs an arm of mode reuse with the same context, and is None without one.
    """
    if not results:
        return ()
    draws = Bootstrap(len(results))
    lost = {
        arm.context: [result.arms[place].kl for result in results]
        for place, arm in enumerate(arms)
        if arm.mode == "reuse"
    }
    full = [result.full_ttft_s for result in results]
    return tuple(
        _row(arm, [r.arms[place] for r in results], full, lost.get(arm.context), draws)
        for place, arm in enumerate(arms)
    )


def _row(
    arm: Arm,
    found: Sequence[ArmResult],
    full: Sequence[float],
    reuse: Sequence[float] | None,
    draws: Bootstrap,
) -> ArmRow:
    kl = draws.mean([one.kl for one in found])
    recovery = None if reuse is None else draws.recovery([one.kl for one in found], reuse)
    points = [one.score for one in found if one.score is not None]
    score = Bootstrap(len(points)).mean(points) if points else None
    apart = [one.differs_at for one in found if one.differs_at is not None]
    return ArmRow(
        mode=arm.mode,
        policy=arm.policy,
        ratio=arm.ratio,
        check_layers=arm.check_layers,
        context=arm.context,
        questions=len(found),
        kl=kl.value,
        kl_low=kl.low,
        kl_high=kl.high,
        kl_median=median(one.kl for one in found),
        kl_first=mean(one.kl_first for one in found),
        recovery=recovery.value if recovery else None,
        recovery_low=recovery.low if recovery else None,
        recovery_high=recovery.high if recovery else None,
        top1=mean(one.top1 for one in found),
        same=1 - len(apart) / len(found),
        differs_at=median(apart) if apart else None,
        score=score.value if score else None,
        score_low=score.low if score else None,
        score_high=score.high if score else None,
        scored=len(points),
        ttft_s=median(one.ttft_s for one in found),
        speedup=median(a / one.ttft_s for a, one in zip(full, found, strict=True)),
        recomputed=mean(one.recomputed / one.cached if one.cached else 0.0 for one in found),
    )
