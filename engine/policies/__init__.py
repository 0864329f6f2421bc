"""Selection policies: which cached tokens are worth recomputing.

To add one: write a frozen dataclass with `name`, `needs` and `score` in a file of its own, and give
it a line in `_POLICIES`. `score` sees `Candidates`, of which `needs` says what is to be there, and
returns one float a token; the tokens with the highest scores are recomputed, ties going to the
lower position. Fields with defaults are parameters, which users write behind the name:
`question:layers=8-20`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.errors import UsageError
from engine.policies.base import (
    Candidates,
    LayerKV,
    Outputs,
    Policy,
    Signal,
    budget,
    covering,
    select,
)
from engine.policies.deviation import (
    KeyDeviation,
    KeyValueDeviation,
    OutputDeviation,
    ValueDeviation,
)
from engine.policies.explicit import Explicit
from engine.policies.first_k import FirstK
from engine.policies.hybrid import Hybrid
from engine.policies.params import brief, only, parse_spec
from engine.policies.question import Question
from engine.policies.random import RANDOM, Random


@dataclass(frozen=True)
class _Given:
    """What a policy may be made from."""

    params: Mapping[str, str]
    seed: int
    indices: Sequence[int] | None


# name: (its parameters, how it is made)
_POLICIES: dict[str, tuple[tuple[str, ...] | None, Callable[[_Given], Policy]]] = {
    "value": ((), lambda given: ValueDeviation()),
    "key": ((), lambda given: KeyDeviation()),
    "key+value": ((), lambda given: KeyValueDeviation()),
    "attention": ((), lambda given: OutputDeviation()),
    "question": (("layers", "heads", "weight"), lambda given: Question.of(given.params)),
    "first-k": (("k",), lambda given: FirstK.of(given.params)),
    "hybrid": (None, lambda given: Hybrid.of(given.params, _shareable(given.seed))),
    RANDOM: ((), lambda given: Random(given.seed)),
    "explicit": ((), lambda given: Explicit.of(given.indices)),
}
POLICY_NAMES = tuple(_POLICIES)
_ALONE = ("hybrid", "explicit")  # those that can't have a share of another


def make_policy(spec: str, *, seed: int = 0, indices: Sequence[int] | None = None) -> Policy:
    """The policy of a spec: its name, and parameters where it is to have other ones than usual:
    `question:layers=8-20,heads=max`. `indices` are `explicit`'s prompt positions.

    Raises UsageError for an unknown name or parameter, and for indices given to another policy.
    """
    name, params = parse_spec(spec)
    if name not in _POLICIES:
        raise UsageError(
            f"policy {brief(name)!r} is unknown", "use one of " + ", ".join(POLICY_NAMES)
        )
    if indices is not None and name != "explicit":
        raise UsageError(f"policy {name} chooses its own tokens", "use --policy explicit")
    known, make = _POLICIES[name]
    if known is not None:
        only(name, params, known)
    return make(_Given(params, seed, indices))


def _shareable(seed: int) -> dict[str, Policy]:
    return {name: make_policy(name, seed=seed) for name in _POLICIES if name not in _ALONE}


__all__ = [
    "POLICY_NAMES",
    "RANDOM",
    "Candidates",
    "LayerKV",
    "Outputs",
    "Policy",
    "Signal",
    "budget",
    "covering",
    "make_policy",
    "select",
]
