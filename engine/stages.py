"""Where tokens are selected in a blend, and whether the question is asked for it."""

from collections.abc import Sequence

from engine.options import BlendOptions
from engine.policies import Policy, budget, make_policy
from engine.sources import Source


def question_layers(options: BlendOptions, sources: Sequence[Source], layers: int) -> range:
    """At which of a model's layers the question's attention is taken: none where nothing depends on
    it. Where there are any, all layers' stored KV is in the KV cache before the first is computed.
    Raises UsageError for layers that the model does not have."""
    hits, cached = _tokens(sources, "hit"), cached_tokens(sources)
    policy = make_policy(options.policy, seed=options.seed, indices=options.indices)
    sizes = stages(options, policy, hits, cached).values()
    if options.threshold is None and not any(0 < n < hits for n in sizes):
        return range(0)
    return policy.question_layers(layers) if hits and sizes else range(0)


def stages(options: BlendOptions, policy: Policy, hits: int, cached: int) -> dict[int, int]:
    """Check layer -> the most tokens that stay selected from there on. hits, cached: tokens."""
    layers = list(options.check_layers)
    if not policy.full_layers:
        layers[0] = 0
    if options.threshold is not None:
        sizes = [hits if options.threshold else 0] * len(layers)
    else:
        sizes = [budget(ratio, hits, cached) for ratio in options.ratios]
    if options.mode != "blend" or (sizes[0] == 0 and options.indices is None):
        return {}  # reuse: nothing to select, so no full layer either
    return dict(zip(layers, sizes, strict=True))


def cached_tokens(sources: Sequence[Source]) -> int:
    """Tokens of chunks whose KV is stored."""
    return _tokens(sources, "hit") + sum(
        len(s.segment.token_ids)
        for s in sources
        if s.status == "exact" and s.segment.kind == "chunk"
    )


def _tokens(sources: Sequence[Source], status: str) -> int:
    return sum(len(s.segment.token_ids) for s in sources if s.status == status)
