"""What a caller may ask of one run, checked where it enters."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Literal, get_args

from cache_store.errors import UsageError
from engine.loaders import check_loader
from engine.policies import make_policy

Mode = Literal["blend", "reuse", "full", "prefix"]
MODES: tuple[Mode, ...] = get_args(Mode)


def parse_ratio(value: str | float | Decimal, what: str = "ratio") -> Decimal:
    """An exact recompute ratio, or another share. Raises UsageError unless it is from 0 to 1."""
    try:
        ratio = Decimal(str(value).strip())
    except InvalidOperation as error:
        raise UsageError(
            f"{what} {value!r} is not a number", "give a number from 0 to 1"
        ) from error
    if not ratio.is_finite() or not 0 <= ratio <= 1:
        raise UsageError(f"{what} {value} is outside 0 to 1", "0.16 is 16%")
    return ratio


@dataclass(frozen=True)
class BlendOptions:
    """How cached chunks become a prompt's KV cache (build with `of`, which checks).

    policy: a spec, see `engine.policies.make_policy`. ratios are non-increasing and as many as
    check_layers; instead of them, threshold selects the tokens that hold this share of the score.
    seed feeds policy `random`; indices are policy `explicit`'s prompt positions; below min_tokens
    cached tokens `blend` is not worth it and full prefill is used; loader: when stored KV is read,
    which changes no result.
    """

    mode: Mode = "blend"
    policy: str = "question"
    ratios: tuple[Decimal, ...] = (Decimal("0.16"),)
    check_layers: tuple[int, ...] = (1,)
    indices: tuple[int, ...] | None = None
    min_tokens: int = 256
    seed: int = 0
    strict_context: bool = False
    loader: str = "pipelined"
    threshold: Decimal | None = None
    transfer: bool | None = None

    @classmethod
    def of(
        cls,
        *,
        mode: str = "blend",
        policy: str = "question",
        ratio: str | float | Decimal | Sequence[str | float | Decimal] = "0.16",
        threshold: str | float | Decimal | None = None,
        check_layers: int | Sequence[int] = 1,
        indices: Sequence[int] | None = None,
        min_tokens: int = 256,
        seed: int = 0,
        strict_context: bool = False,
        loader: str = "pipelined",
        transfer: bool | None = None,
    ) -> "BlendOptions":
        """Checks everything that needs no model. Raises UsageError."""
        known = next((name for name in MODES if name == mode), None)
        if known is None:
            raise UsageError(f"mode {mode!r} is unknown", "use one of " + ", ".join(MODES))
        layers = (check_layers,) if isinstance(check_layers, int) else tuple(check_layers)
        given = (ratio,) if isinstance(ratio, str | float | int | Decimal) else tuple(ratio)
        ratios = tuple(parse_ratio(item) for item in given)
        if not layers or not ratios:
            raise UsageError("at least one check layer and one ratio are needed")
        if 0 in layers:
            raise UsageError(
                "check layer 0 cannot choose tokens: there K and V depend on the token alone, so "
                "their deviation is rounding noise",
                "use --check-layer 1 or higher",
            )
        if any(layer < 0 for layer in layers):
            raise UsageError("a check layer below 0 was given", "use --check-layer 1 or higher")
        if any(b <= a for a, b in pairwise(layers)):
            raise UsageError(f"check layers must rise: {', '.join(map(str, layers))}")
        if len(ratios) == 1:
            ratios *= len(layers)
        if len(ratios) != len(layers):
            raise UsageError(
                f"{len(ratios)} ratios for {len(layers)} check layers",
                "give one ratio for all, or one for each check layer",
            )
        if any(b > a for a, b in pairwise(ratios)):
            raise UsageError("ratios must not rise from one check layer to the next")
        if min_tokens < 0:
            raise UsageError(f"min_tokens must not be negative, not {min_tokens}")
        made = make_policy(policy, seed=seed, indices=indices)
        share = None if threshold is None else parse_ratio(threshold, "threshold")
        if share is not None and not made.amounts:
            raise UsageError(
                f"policy {made.name} has no amounts that a threshold could add up", "use a ratio"
            )
        check_loader(loader)
        if indices is not None and known != "blend":
            raise UsageError(f"mode {known} recomputes no chosen tokens", "use --mode blend")
        chosen = None if indices is None else tuple(sorted(set(indices)))
        return cls(
            known,
            policy,
            ratios if share is None else (),
            layers,
            chosen,
            min_tokens,
            seed,
            strict_context,
            loader,
            share,
            transfer,
        )

    @property
    def computes_all(self) -> bool:
        """Ratio or threshold 1 throughout: everything is computed, exact tokens too, as in a full
        prefill."""
        shares = self.ratios if self.threshold is None else (self.threshold,)
        return self.mode == "blend" and self.indices is None and min(shares) == 1

    @property
    def transfers(self) -> bool:
        """Whether tokens that are not recomputed are moved like their neighbours."""
        chosen = make_policy(self.policy, seed=self.seed, indices=self.indices)
        wanted = chosen.transfers if self.transfer is None else self.transfer
        return self.mode == "blend" and wanted

    def check_model(self, layers: int) -> None:
        """Raises UsageError for a layer the model does not have."""
        chosen = make_policy(self.policy, seed=self.seed, indices=self.indices)
        chosen.question_layers(layers)
        needed = chosen.full_layers or len(self.check_layers) > 1
        if self.mode == "blend" and needed and self.check_layers[-1] >= layers:
            raise UsageError(
                f"check layer {self.check_layers[-1]} is not in this model of {layers} layers",
                f"use --check-layer 1 to {layers - 1}",
            )


@dataclass(frozen=True)
class SamplingOptions:
    """How output tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep all."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UsageError(f"sampling's top-k must be 0 or more, not {self.top_k}")
        if any(not text for text in self.stop):
            raise UsageError("an empty stop string would stop every answer")
