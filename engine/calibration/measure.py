"""What to measure for curves, every policy at every ratio, and the curves of what came of it."""

from collections.abc import Sequence
from decimal import Decimal

from engine.calibration.curve import Curve, Point, falling
from engine.evaluation.arms import Arm, plan_arms
from engine.evaluation.report import ArmRow, curves

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


def fitted(rows: Sequence[ArmRow]) -> tuple[Curve, ...]:
    """The curves of an evaluation with one context, their KL made to fall."""
    found = []
    for line in curves(rows):
        row = next(row for row in line if row.policy is not None)
        found.append(Curve(str(row.policy), row.check_layers, _points(line)))
    return tuple(found)


def _points(rows: Sequence[ArmRow]) -> tuple[Point, ...]:
    values = falling([row.kl for row in rows])
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
        for row, value in zip(rows, values, strict=True)
    )
