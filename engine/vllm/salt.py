"""What sets a blended request's blocks apart in vLLM's prefix cache."""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.policies import make_policy
from engine.vllm.plan import RequestPlan


@dataclass(frozen=True)
class Salt:
    """Makes a request's `cache_salt` from all that its blended KV depends on.

    Blended KV is approximate: vLLM may share it only between requests that are blended in the very
    same way. Which of a chunk's tokens are recomputed depends on the chunks behind it too, so the
    salt is of all of them; of the question only where the policy reads it. layers: the model's.
    store: what the store and the model are known by. secret: nobody who writes requests can make
    a salt that is another's.
    """

    layers: int
    store: str
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __call__(self, plan: RequestPlan, own: str | None) -> str:
        """own: the salt that the request came with, which keeps its meaning."""
        o, prompt = plan.options, plan.prompt
        said = repr(
            (
                *(self.secret, self.store, own),
                *(o.mode, o.policy, o.ratios, o.threshold, o.check_layers, o.indices, o.seed),
                *(o.transfers, o.strict_context, o.min_tokens),
                [(s.kind, s.end) for s in prompt.segments[:-1]],
                _digest(prompt.token_ids[: plan.end]),
                _digest(self._question(plan)),
            )
        )
        return "cacheblend-" + hashlib.sha256(said.encode()).hexdigest()

    def _question(self, plan: RequestPlan) -> Sequence[int]:
        """The tokens of the suffix that the blended KV depends on."""
        o = plan.options
        if o.mode != "blend":
            return ()
        policy = make_policy(o.policy, seed=o.seed, indices=o.indices)
        if not policy.question_layers(self.layers):
            return ()
        suffix = plan.prompt.segments[-1].token_ids
        return suffix if plan.question_tokens is None else suffix[: plan.question_tokens]


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()
