"""Quality over ratio: the KL that each ratio of a policy leaves, made to fall for looking it up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import pairwise
from typing import Any

from engine.policies import RANDOM

STEP = Decimal("0.01")
ALIKE = 0.05  # share of a speedup that another may lack and count as equal: what timing is good for


@dataclass(frozen=True)
class Point:
    """A ratio's mean KL in nats with a 95% interval (None for fewer than two prompts), recovery
    (None where reuse loses nothing) and top-1 agreement, as measured; fitted: KL never above that
    of a smaller ratio; speedup: full prefill's time to first token over this one's."""

    ratio: float
    kl: float
    kl_low: float | None
    kl_high: float | None
    recovery: float | None
    top1: float
    speedup: float
    fitted: float


@dataclass(frozen=True)
class Curve:
    """Points of one policy by rising ratio, from 0 to 1. check_layers: None where the policy needs
    no fresh KV to choose by."""

    policy: str
    check_layers: tuple[int, ...] | None
    points: tuple[Point, ...]

    def kl_at(self, ratio: Decimal) -> float:
        """The fitted KL, between two ratios in a straight line."""
        wanted = float(ratio)
        for a, b in pairwise(self.points):
            if a.ratio <= wanted <= b.ratio:
                part = (wanted - a.ratio) / (b.ratio - a.ratio)
                return a.fitted + part * (b.fitted - a.fitted)
        return self.points[-1].fitted

    def ratio_for(self, target_kl: float) -> Decimal:
        """The smallest ratio, in hundredths, whose fitted KL is at most that; 1 where none's is."""
        if self.points[0].fitted <= target_kl:
            return Decimal(0)
        for a, b in pairwise(self.points):
            if b.fitted <= target_kl:
                part = (a.fitted - target_kl) / (a.fitted - b.fitted)
                exact = Decimal(a.ratio + part * (b.ratio - a.ratio))
                # Not up by a step for what is only a float's rounding.
                return (exact - Decimal("1e-9")).quantize(STEP, ROUND_CEILING)
        return Decimal(1)

    def speedup_at(self, ratio: Decimal) -> float | None:
        """Full prefill's time to first token over that at a ratio, whose time lies between two
        measured ones in a straight line; None where it isn't known."""
        wanted = float(ratio)
        for a, b in pairwise(self.points):
            if a.ratio <= wanted <= b.ratio:
                if not all(math.isfinite(p.speedup) and p.speedup > 0 for p in (a, b)):
                    return None
                part = (wanted - a.ratio) / (b.ratio - a.ratio)
                return 1 / ((1 - part) / a.speedup + part / b.speedup)
        return None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Curve":
        """Raises KeyError, TypeError or ValueError for what isn't one."""
        layers = value["check_layers"]
        return cls(
            str(value["policy"]),
            None if layers is None else tuple(int(layer) for layer in layers),
            tuple(Point(**point) for point in value["points"]),
        )


def best(found: Sequence[Curve], target_kl: float, first: str) -> Curve:
    """The curve whose policy gives the first token soonest at its ratio for the target: of equal
    quality, the best is the fastest. Of those that are about as fast, and where a speed isn't
    known, the one with the smallest ratio; of equal ones policy `first`'s, then the one with the
    lower KL there. `random` is only compared with."""
    chosen = [curve for curve in found if curve.policy != RANDOM] or list(found)
    speeds = [curve.speedup_at(curve.ratio_for(target_kl)) for curve in chosen]
    known = [speed for speed in speeds if speed is not None]
    if len(known) == len(chosen):
        least = max(known) * (1 - ALIKE)
        chosen = [curve for curve, speed in zip(chosen, known, strict=True) if speed >= least]

    def order(curve: Curve) -> tuple[Decimal, bool, float]:
        ratio = curve.ratio_for(target_kl)
        return ratio, curve.policy != first, curve.kl_at(ratio)

    return min(chosen, key=order)


def falling(values: Sequence[float]) -> list[float]:
    """The values that never rise and are nearest to these, by least squares: where one rises, it
    and those before it share their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, m), (b, n) = pools[-2], pools[-1]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]
