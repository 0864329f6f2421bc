"""How stored KV is blended, and what is kept of how that went."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from cbcli import values
from cbcli.declaration import BLEND, TRACE, setting
from engine.task import TASKS

# Those of engine.policies and engine.loaders, which a listing of settings should not have to
# import.
POLICIES = (
    *("value", "key", "key+value", "attention", "question", "first-k", "hybrid"),
    *("random", "explicit"),
)
LOADERS = ("pipelined", "sync", "async", "prefetch")


@dataclass(frozen=True)
class BlendSettings:
    mode: str = setting(
        "blend",
        values.choice("blend", "reuse", "full", "prefix"),
        "How the prompt is computed: blend, reuse, full or prefix",
        group=BLEND,
    )
    ratio: tuple[Decimal, ...] = setting(
        "0.16",
        values.ratios,
        "Share of the cached tokens to recompute, 0 to 1, one a check layer: 0.3,0.16; or auto: "
        "as much as loading takes anyway",
        short="-r",
        group=BLEND,
    )
    target_kl: float | None = setting(
        None,
        values.number(0, 100, above=True),
        "Mean KL from full prefill, in nats, that the calibration finds the ratio for",
        group=BLEND,
        example="0.02",
    )
    task: str = setting(
        "qa",
        values.choice(*TASKS),
        f"What prompts ask for, as calibrated: {' or '.join(TASKS)}",
        group=BLEND,
    )
    force: bool = setting(
        False,
        values.flag,
        "Blend with a model that failed the gate of its calibration",
        group=BLEND,
    )
    policy: str = setting(
        "question",
        values.policy(*POLICIES),
        f"What selects tokens: {', '.join(POLICIES)}, with parameters behind a colon: "
        "question:layers=8-20",
        group=BLEND,
    )
    threshold: Decimal | None = setting(  # noqa: RUF009
        None,
        values.share,
        "Instead of a ratio: recompute the tokens that hold this share of the score, 0 to 1",
        group=BLEND,
        example="0.5",
    )
    transfer: bool | None = setting(
        None,
        values.flag,
        "Move the other tokens by what recomputed ones deviate; unset: as the policy does",
        group=BLEND,
        example="false",
    )
    check_layers: tuple[int, ...] = setting(
        "1",
        values.layers,
        "Layers at which tokens are selected, from 1 on",
        flag="--check-layer",
        repeat=True,
        group=BLEND,
    )
    loader: str = setting(
        "pipelined",
        values.choice(*LOADERS),
        f"When stored KV is read: {', '.join(LOADERS)}",
        group=BLEND,
    )
    min_tokens: int = setting(
        256,
        values.whole(0),
        "Below so many cached tokens the whole prompt is computed",
        group=BLEND,
    )
    strict_context: bool = setting(
        False,
        values.flag,
        "Use only chunks computed behind this very system prompt",
        off="--any-context",
        group=BLEND,
    )
    save: bool = setting(
        True, values.flag, "Store chunks that were missing, after the answer", group=BLEND
    )
    audit: int = setting(
        0,
        values.whole(0),
        "Check one in so many answers against full prefill; 0: none",
        metavar="N",
        group=BLEND,
    )
    check: bool = setting(
        True, values.flag, "ingest reads what is stored already, every byte of it, and mends it"
    )
    traces: int = setting(
        10, values.whole(0, 10_000), "How many of the last answers' traces are kept; 0: none"
    )
    trace_level: str = setting(
        "basic",
        values.choice("basic", "full"),
        "What a trace holds: basic, or full, which measures stored KV against a full prefill",
        group=TRACE,
    )
    trace_layers: tuple[int, ...] | None = setting(
        None,
        values.layers,
        "Layers that a full trace measures, such as 1,8,16; unset: a few spread over the model",
        group=TRACE,
        example='"1,8,16"',
    )
