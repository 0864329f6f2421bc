"""Measures curves: every policy at every ratio, over all prompts."""

from collections.abc import Callable, Sequence
from decimal import Decimal

from engine.api import Engine
from engine.calibration.curve import Curve, Point, falling
from engine.evaluation.arms import Arm, plan_arms
from engine.evaluation.questions import Question
from engine.evaluation.report import ArmRow, summarise
from engine.evaluation.runner import evaluate

RATIOS = tuple(Decimal(r) for r in ("0.05", "0.1", "0.16", "0.2", "0.25", "0.3", "0.5"))


def candidates(policies: Sequence[str] = ()) -> tuple[str, ...]:
    """The policies given, or the usual one and CacheBlend's own."""
    return tuple(policies) or ("question", "value")


def plan(
    policies: Sequence[str],
    ratios: Sequence[Decimal],
    check_layers: Sequence[int],
    context: str,
    seed: int,
) -> tuple[Arm, ...]:
    """The arms of `policies` and, to compare with, `random`; full prefill, reuse, and ratio 1."""
    return plan_arms(
        policies=policies,
        ratios=[*ratios, Decimal(1)],
        check_layers=check_layers,
        contexts=(context,),
        seed=seed,
    )


def measure(
    engine: Engine,
    questions: Sequence[Question],
    arms: Sequence[Arm],
    on_step: Callable[[str], None] = lambda text: None,
) -> tuple[Curve, ...]:
    """A curve for every policy of the arms (see `plan`), over all questions."""
    return curves(summarise(arms, list(evaluate(engine, questions, arms, on_step=on_step))))


def curves(rows: Sequence[ArmRow]) -> tuple[Curve, ...]:
    """The rows of an evaluation as curves, reuse being every policy's ratio 0."""
    ends = [row for row in rows if row.policy is None and row.mode in ("reuse", "blend")]
    lines: dict[tuple[str, tuple[int, ...] | None], list[ArmRow]] = {}
    for row in rows:
        if row.policy is not None:
            lines.setdefault((row.policy, row.check_layers), []).append(row)
    return tuple(
        Curve(policy, layers, _points(sorted([*line, *ends], key=lambda row: row.ratio or 0.0)))
        for (policy, layers), line in lines.items()
    )


def _points(rows: Sequence[ArmRow]) -> tuple[Point, ...]:
    fitted = falling([row.kl for row in rows])
    return tuple(
        Point(
            row.ratio or 0.0,
            row.kl,
            row.kl_low,
            row.kl_high,
            row.recovery,
            row.top1,
            row.speedup,
            value,
        )
        for row, value in zip(rows, fitted, strict=True)
    )
