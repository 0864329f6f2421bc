"""How many floating-point operations a prefill needs, and how much sooner that lets a blend be.

Counted are the matrix products a run cannot do without: linear layers in proportion to the tokens
they see, attention in proportion to the keys each query may see, the LM head for one token, and
scoring, which for some policies is a prefill of the question of its own. Norms, rotation, softmax
and copies are not. `speedup` is the limit at equal operation rates: what a blend reaches over a
full prefill if it does its operations as fast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from engine.config import ModelConfig
from engine.options import BlendOptions
from engine.policies import Policy, budget, make_policy
from engine.prefill import PrefillRun

# Operations for each number that a policy compares: subtract, square, add.
PER_ELEMENT = 3


@dataclass(frozen=True)
class Flops:
    """Floating-point operations; a multiplication and an addition are two."""

    linear: int = 0
    attention: int = 0
    scoring: int = 0

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.scoring

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.linear + other.linear,
            self.attention + other.attention,
            self.scoring + other.scoring,
        )


@dataclass(frozen=True)
class Speedup:
    """The bound on full prefill over blend. overall: of all operations, DESIGN's bound; linear
    and attention: of one kind alone. Where one kind's operations are slower on a machine, the
    bound there lies nearer to that kind's. float("inf") where a blend needs none."""

    overall: float
    linear: float
    attention: float


def speedup(full: Flops, blend: Flops) -> Speedup:
    """How many times fewer operations `blend` needs."""

    def over(a: int, b: int) -> float:
        return a / b if b else float("inf")

    return Speedup(
        over(full.total, blend.total),
        over(full.linear, blend.linear),
        over(full.attention, blend.attention),
    )


def full_prefill(config: ModelConfig, tokens: int) -> Flops:
    """A causal prefill of a whole prompt; the last layer gives only the last token's output."""
    return _prefill(config, tokens, [range(tokens)] * config.layers)


def of_run(config: ModelConfig, run: PrefillRun, options: BlendOptions) -> Flops:
    """What a prefill that was made with `options` needed.

    Where several check layers narrow the selection step by step, the tokens between the first and
    the last of them are known by their number, and counted as evenly spread.
    """
    tokens = sum(len(source.segment.token_ids) for source in run.used)
    if options.mode == "full" or run.skipped or options.computes_all:
        kept = len(_positions(run, "kept"))
        return _prefill(config, tokens, [range(kept, tokens)] * config.layers)
    always, hits = _positions(run, "computed", "miss"), _positions(run, "hit")
    chosen = {len(run.selected): list(run.selected), len(hits): hits}
    at = {n: sorted(always + chosen.get(n, spread(hits, n))) for n in set(run.per_layer)}
    policy = make_policy(options.policy, seed=options.seed, indices=options.indices)
    found = _prefill(config, tokens, [at[n] for n in run.per_layer])
    if policy.full_layers and run.per_layer[0]:
        scored = sum(run.per_layer[i] for i in options.check_layers if i < config.layers)
        found += comparing(config, policy, scored)
        if "output" in policy.needs:
            found += Flops(attention=_twice(config, options.check_layers, run.per_layer, at))
    if _asks(options, len(hits), run.cached_tokens):
        found += reading(config, policy, always)
    return found


def _asks(options: BlendOptions, hits: int, cached: int) -> bool:
    """Whether some, but not all, of the hits are to be chosen, for which a policy may have asked
    the question; how many come of it is another matter where a threshold says."""
    if options.mode != "blend" or not hits:
        return False
    if options.threshold is not None:
        return options.threshold > 0
    return any(0 < budget(ratio, hits, cached) < hits for ratio in options.ratios)


def predicted(
    config: ModelConfig,
    *,
    prefix: int,
    cached: int,
    always: int,
    exact: int = 0,
    ratio: Decimal = Decimal("0.16"),
    check_layer: int = 1,
    policy: str = "value",
) -> Flops:
    """What a blend will need, before it is run.

    A stored prefix comes first, then `cached` chunk tokens, of which the first `exact` need
    nothing, then `always` tokens computed in any case. `ratio` of the cached ones are selected,
    evenly spread: at `check_layer` where the policy needs full layers, else before layer 0.
    """
    hits = range(prefix + exact, prefix + cached)
    tokens = prefix + cached + always
    tail = list(range(prefix + cached, tokens))
    count = budget(ratio, len(hits), cached)
    selected = spread(hits, count) + tail
    chooser = policy_of(policy)
    if not count:
        return _prefill(config, tokens, [selected] * config.layers)
    asked = reading(config, chooser, tail) if count < len(hits) else Flops()
    if not chooser.full_layers:
        return _prefill(config, tokens, [selected] * config.layers) + asked
    before = [list(hits) + tail] * (check_layer + 1)
    layers = before + [selected] * (config.layers - len(before))
    compared = comparing(config, chooser, len(hits))
    if "output" in chooser.needs:
        everyone = {len(hits): list(hits) + tail}
        counts = [len(hits)] * config.layers
        compared += Flops(attention=_twice(config, [check_layer], counts, everyone))
    return _prefill(config, tokens, layers) + compared + asked


def policy_of(spec: str) -> Policy:
    """The policy of a spec, `explicit` without the positions of a prompt."""
    return make_policy(spec, indices=() if spec == "explicit" else None)


def comparing(config: ModelConfig, policy: Policy, candidates: int) -> Flops:
    """What comparing so many cached tokens costs; policies that compare nothing cost nothing."""
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    numbers = policy.compared(kv_heads * dim, heads * dim)
    return Flops(scoring=PER_ELEMENT * numbers * candidates)


def reading(config: ModelConfig, policy: Policy, asking: Sequence[int]) -> Flops:
    """What it takes that the tokens at these positions read the reused KV first, where a policy
    wants to know what they look at: a prefill of them that ends with the last layer asked for."""
    c, end = config, policy.question_layers(config.layers).stop
    if not end:
        return Flops()
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv = 2 * c.hidden * (width + 2 * kv_width)
    rest = 2 * c.hidden * width + 2 * 3 * c.hidden * c.intermediate
    pairs = [visible_keys(asking, window) for window in c.windows[:end]]
    # Of the last layer, Q K^T alone.
    return Flops(
        len(asking) * (end * qkv + (end - 1) * rest),
        4 * width * sum(pairs[:-1]) + 2 * width * pairs[-1],
    )


def _twice(
    config: ModelConfig,
    check_layers: Sequence[int],
    counts: Sequence[int],
    at: Mapping[int, Sequence[int]],
) -> int:
    """Attention over fresh and over cached KV at each check layer, by the tokens there (their
    number -> their positions)."""
    pairs = sum(
        visible_keys(at[counts[layer]], config.windows[layer])
        for layer in check_layers
        if layer < config.layers
    )
    return 2 * 4 * config.heads * config.head_dim * pairs


def spread(positions: Sequence[int], count: int) -> list[int]:
    """So many of `positions`, at equal distances."""
    n = len(positions)
    return [positions[(2 * i + 1) * n // (2 * count)] for i in range(count)]


def _positions(run: PrefillRun, *statuses: str) -> list[int]:
    return [
        p
        for source in run.used
        if source.status in statuses
        for p in range(source.segment.start, source.segment.end)
    ]


def _prefill(config: ModelConfig, tokens: int, layers: Sequence[Sequence[int]]) -> Flops:
    """layers: positions that get fresh K and V at each layer. The tokens that go on through a
    layer are those the next one begins with; after the last layer it is the prompt's last one."""
    c = config
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    kv = 2 * c.hidden * 2 * kv_width
    rest = 2 * c.hidden * 2 * width + 2 * 3 * c.hidden * c.intermediate
    linear, pairs = 2 * c.hidden * c.vocab, 0
    seen: dict[tuple[int, int | None], int] = {}  # layers mostly share their positions
    outputs = [*layers[1:], [tokens - 1]]
    for queries, fresh, window in zip(outputs, layers, c.windows, strict=True):
        linear += kv * len(fresh) + rest * len(queries)
        key = (id(queries), window)
        if key not in seen:
            seen[key] = visible_keys(queries, window)
        pairs += seen[key]
    return Flops(linear, 4 * width * pairs)  # Q K^T and P V: two products, 2 operations each


def visible_keys(positions: Sequence[int], window: int | None) -> int:
    """Σ over queries of the keys each may see: all up to its own position, in its window."""
    if window is None:
        return sum(positions) + len(positions)
    return sum(min(p + 1, window) for p in positions)
