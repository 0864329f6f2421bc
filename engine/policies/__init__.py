"""Selection policies: which cached tokens are worth recomputing.

To add one: write a frozen dataclass with `name`, `needs_deviation` and `score` in a file of its
own and name it in `_POLICIES`. `score` sees `Candidates` and returns one float a token; the tokens
with the highest scores are recomputed, ties going to the lower position.
"""

from collections.abc import Callable, Sequence

from cache_store.errors import UsageError
from engine.policies.base import Candidates, LayerKV, Policy, budget, select
from engine.policies.deviation import KeyDeviation, KeyValueDeviation, ValueDeviation
from engine.policies.explicit import Explicit
from engine.policies.random import Random

_POLICIES: dict[str, Callable[[int, Sequence[int] | None], Policy]] = {
    "value": lambda seed, indices: ValueDeviation(),
    "key": lambda seed, indices: KeyDeviation(),
    "key+value": lambda seed, indices: KeyValueDeviation(),
    "random": lambda seed, indices: Random(seed),
    "explicit": lambda seed, indices: Explicit.of(indices),
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, *, seed: int = 0, indices: Sequence[int] | None = None) -> Policy:
    """The policy of that name. `indices` are `explicit`'s prompt positions.

    Raises UsageError for an unknown name, and for indices given to another policy.
    """
    if name not in _POLICIES:
        raise UsageError(f"policy {name!r} is unknown", "use one of " + ", ".join(POLICY_NAMES))
    if indices is not None and name != "explicit":
        raise UsageError(f"policy {name} chooses its own tokens", "use --policy explicit")
    return _POLICIES[name](seed, indices)


__all__ = [
    "POLICY_NAMES",
    "Candidates",
    "LayerKV",
    "Policy",
    "budget",
    "make_policy",
    "select",
]
