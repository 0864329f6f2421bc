"""Arms: the ways of answering that are compared, each question in all of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from cache_store.errors import UsageError
from engine.context import ContextKind, context_kind
from engine.options import BlendOptions
from engine.policies import RANDOM, make_policy


@dataclass(frozen=True)
class Arm:
    """One way of answering. What is the same work is the same arm: ratio 0 of any policy is
    reuse, and ratio 1 recomputes everything whatever the policy is.

    context: what the chunks' KV was computed behind.
    """

    options: BlendOptions
    context: ContextKind = "prefix"

    @property
    def mode(self) -> str:
        return self.options.mode

    @property
    def policy(self) -> str | None:
        """The policy's spec; None where none selects anything."""
        chooses = self.options.mode == "blend" and not self.options.computes_all
        return self.options.policy if chooses else None

    @property
    def ratio(self) -> float | None:
        """Share of cached tokens recomputed in the end; None for a full prefill and `prefix`."""
        ends = {"reuse": 0.0, "blend": float(self.options.ratios[-1])}
        return ends.get(self.options.mode)

    @property
    def check_layers(self) -> tuple[int, ...] | None:
        """Where tokens are selected; None where that plays no part."""
        if self.policy is None or not _deviates(self.policy):
            return None
        return self.options.check_layers

    @property
    def key(self) -> str:
        """All that decides what this arm computes, as one text; the same in every process."""
        facts = {"context": self.context, **_plain(asdict(self.options))}
        return " ".join(f"{name}={value}" for name, value in facts.items())


def plan_arms(
    *,
    policies: Sequence[str],
    ratios: Sequence[Decimal],
    check_layers: Sequence[int] = (1,),
    modes: Sequence[str] = ("blend",),
    contexts: Sequence[str] = ("prefix",),
    seed: int = 0,
    random: bool = True,
    **options: Any,
) -> tuple[Arm, ...]:
    """Every arm once: full prefill, and for each context reuse, which recovery is measured from,
    then the modes in their order, blend with every policy and ratio.

    check_layers: each an arm of its own for policies that need fresh KV there. random: whether
    that policy is added. options: further ones of `BlendOptions.of`, for all arms. Raises
    UsageError for what no run could honour.
    """
    common = {"min_tokens": 0, "seed": seed, **options}
    if RANDOM not in policies and random and policies:
        policies = [*policies, RANDOM]
    kinds = [context_kind(context) for context in contexts]
    # What reads no stored KV is asked with that which is there anyway.
    arms = [Arm(BlendOptions.of(mode="full", **common), kinds[0])]
    for context in kinds:
        for mode in dict.fromkeys(["reuse", *modes]):
            if mode == "blend":
                for policy in policies:
                    found = _of_policy(policy, ratios, check_layers, common)
                    arms += [Arm(options, context) for options in found]
            elif mode != "full":
                arms.append(Arm(BlendOptions.of(mode=mode, **common), context))
    if "blend" in modes and 1 in ratios:
        arms.append(Arm(BlendOptions.of(ratio=1, **common), kinds[0]))
    return tuple(dict.fromkeys(arms))


def _of_policy(
    policy: str, ratios: Sequence[Decimal], check_layers: Sequence[int], common: dict[str, Any]
) -> list[BlendOptions]:
    if policy.partition(":")[0] == "explicit":
        raise UsageError(
            "policy explicit takes the positions of one prompt", "evaluate another policy"
        )
    layers: Sequence[int | None] = check_layers if _deviates(policy) else (None,)
    found = []
    for layer in layers:
        chosen = common if layer is None else {**common, "check_layers": layer}
        found += [
            BlendOptions.of(policy=policy, ratio=ratio, **chosen)
            for ratio in sorted(set(ratios))
            if 0 < ratio < 1
        ]
    return found


def _deviates(policy: str) -> bool:
    return make_policy(policy).full_layers


def _plain(value: Any) -> Any:
    """Decimals as they are written, without zeros that change nothing."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return ",".join(str(_plain(item)) for item in value)
    return value
