"""What `eval` is asked for, read and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_store.errors import UsageError
from cbcli.bench_options import listed, wholes

if TYPE_CHECKING:
    from engine.evaluation.arms import Arm


def split_policies(given: Sequence[str]) -> tuple[str, ...]:
    """Policy specs of a repeatable, comma-separated flag, each once.

    A spec may hold commas itself, `question:layers=8-20,heads=mean`: a part with a value and no
    name of its own belongs to the spec before it.
    """
    specs: list[str] = []
    for text in given:
        own = len(specs)
        for part in (piece.strip() for piece in text.split(",")):
            before, equals, _ = part.partition("=")
            if equals and ":" not in before and len(specs) > own:
                specs[-1] += f",{part}"
            elif part:
                specs.append(part)
    if not specs:
        raise UsageError("--policies: nothing was given", "such as --policies value,key")
    return tuple(dict.fromkeys(specs))


def plan(
    *,
    modes: str,
    policies: Sequence[str],
    ratios: str,
    check_layers: str,
    contexts: str,
    seed: int,
    random: bool,
    loader: str,
) -> tuple[Arm, ...]:
    """The arms that flags ask for. Raises UsageError."""
    from engine.evaluation.arms import plan_arms
    from engine.options import parse_ratio

    return plan_arms(
        policies=policies,
        ratios=[parse_ratio(item) for item in listed("--ratios", ratios)],
        check_layers=wholes("--check-layer", check_layers, "layer", "1,8"),
        modes=listed("--modes", modes),
        contexts=listed("--contexts", contexts),
        seed=seed,
        random=random,
        loader=loader,
    )
