"""Time to first token: full prefill, reuse, blends and other engines on the same token ids."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from statistics import median
from typing import Any

from engine.base import BaseEngine
from engine.bench.fit import linear_fit
from engine.bench.layout import standard_length, standard_prompt, stored, text_ids
from engine.bench.measure import in_turn, paired, telling
from engine.bench.peers import Peer
from engine.bound import Flops, full_prefill, of_run, speedup, spread
from engine.options import BlendOptions
from engine.policies import budget
from engine.prompt import Prompt

OnRound = Callable[[str], None]


@dataclass(frozen=True)
class TtftSweep:
    """What to measure: every prompt length with every ratio, policy and loader."""

    tokens: tuple[int, ...] = (1024, 4096)
    ratios: tuple[Decimal, ...] = (Decimal("0.05"), Decimal("0.16"), Decimal("0.3"))
    policies: tuple[str, ...] = ("question", "value", "explicit")
    loaders: tuple[str, ...] = ("pipelined",)
    check_layer: int = 1
    pairs: int = 5

    def check(self, layers: int, context: int) -> None:
        """Raises UsageError for what the model cannot do, before anything is measured."""
        for way in self.ways():
            indices = [0] if way.policy == "explicit" else None
            _options(way, self.check_layer, indices).check_model(layers)
        for tokens in self.tokens:
            standard_length(tokens, context)

    def ways(self) -> list["Way"]:
        """Full prefill first, then reuse and blends: each of the latter with every loader."""
        return [
            Way("full"),
            *(Way("reuse", loader=loader) for loader in self.loaders),
            *(
                Way("blend", policy, ratio, loader)
                for policy in self.policies
                for ratio in sorted(self.ratios)
                for loader in self.loaders
            ),
        ]


@dataclass(frozen=True)
class Way:
    """A way to the first token. name: full, reuse, blend, or a peer's, which prefills in full."""

    name: str
    policy: str | None = None
    ratio: Decimal | None = None
    loader: str | None = None


@dataclass(frozen=True)
class Sample:
    """One run. load_s and stall_s: reading stored KV, and waiting for it."""

    seconds: float
    token: int
    load_s: float = 0.0
    stall_s: float = 0.0
    bytes_loaded: int = 0
    recomputed: int = 0
    computed: int = 0
    flops: Flops | None = None


@dataclass(frozen=True)
class TtftRow:
    """One way at one prompt length; seconds are those of the rounds, in their order.

    speedup: full prefill's time over this one's, round by round, its median and extremes.
    over_peers: the same for each peer's full prefill. bound: what the speedup could be at equal
    operation rates, of all operations and of each kind (`engine.bound`); share: speedup over bound.
    recomputed: cached tokens selected; computed: all tokens that go through the last layers.
    """

    tokens: int
    way: str
    policy: str | None
    ratio: float | None
    loader: str | None
    seconds: tuple[float, ...]
    median_s: float
    min_s: float
    max_s: float
    speedup: float
    speedup_min: float
    speedup_max: float
    over_peers: dict[str, float]
    bound: float | None
    bound_linear: float | None
    bound_attention: float | None
    share: float | None
    recomputed: int | None
    computed: int
    load_s: float | None
    stall_s: float | None
    bytes_loaded: int | None
    first_token: int


@dataclass(frozen=True)
class CostFit:
    """seconds = intercept_s + seconds_per_unit * (tokens computed * prompt tokens), over every
    length and ratio measured with a policy and a loader, reuse included. r2: of the variance."""

    policy: str
    loader: str | None
    points: int
    intercept_s: float
    seconds_per_unit: float
    r2: float


def measure_ttft(
    engine: BaseEngine,
    sweep: TtftSweep,
    peers: Sequence[Peer],
    text: str | None,
    on_round: OnRound,
) -> list[TtftRow]:
    """Rows in the order of lengths and ways, the peers' after full prefill's.

    text: what the prompts are made of (None: pseudo-text). on_round is told what comes next.
    Raises UsageError for a prompt the model has no room for, CacheblendError for a full disk.
    """
    rows: list[TtftRow] = []
    for wanted in sweep.tokens:
        length = standard_length(wanted, engine.model.config.context)
        prompt = standard_prompt(text_ids(engine.tokenizer, length, text))
        on_round(f"{length} tokens: storing chunks")
        with stored(engine, prompt) as over:
            ways: dict[Way, Callable[[], Sample]] = {
                way: partial(_ours, over, prompt, _of(way, prompt, sweep.check_layer))
                for way in sweep.ways()
            }
            theirs = {Way(peer.name): partial(_theirs, peer, prompt) for peer in peers}
            tell = telling(on_round, f"{length} tokens", sweep.pairs)
            samples = in_turn(ways | theirs, sweep.pairs, tell)
        rows += _rows(engine, length, samples, list(theirs))
    return rows


def fit_costs(rows: Sequence[TtftRow]) -> list[CostFit]:
    """Whether time grows in proportion to tokens computed × prompt length."""
    fits = []
    for policy, loader in dict.fromkeys((r.policy, r.loader) for r in rows if r.way == "blend"):
        points = [
            row
            for row in rows
            if row.loader == loader and (row.way == "reuse" or row.policy == policy)
        ]
        found = linear_fit(
            [float(row.computed * row.tokens) for row in points], [row.median_s for row in points]
        )
        if found is not None and policy is not None:
            fits.append(
                CostFit(policy, loader, found.points, found.intercept, found.slope, found.r2)
            )
    return fits


def _of(way: Way, prompt: Prompt, check_layer: int) -> BlendOptions:
    if way.policy != "explicit" or way.ratio is None:
        return _options(way, check_layer, None)
    chunks = [s for s in prompt.segments if s.kind == "chunk"]
    hits = range(chunks[1].start, chunks[-1].end)  # the first one is exact: nothing to recompute
    count = budget(way.ratio, len(hits), chunks[-1].end - chunks[0].start)
    return _options(way, check_layer, spread(hits, count))


def _options(way: Way, check_layer: int, indices: Sequence[int] | None) -> BlendOptions:
    given: dict[str, Any] = {"mode": way.name, "min_tokens": 0}
    if way.policy is not None:
        given |= {"policy": way.policy, "ratio": way.ratio, "check_layers": check_layer}
    if way.loader is not None:
        given["loader"] = way.loader
    return BlendOptions.of(**given, indices=indices)


def _ours(engine: BaseEngine, prompt: Prompt, options: BlendOptions) -> Sample:
    began = time.perf_counter()
    run = engine.prefill(prompt, options)
    token = int(run.logits.argmax())
    seconds = time.perf_counter() - began
    always = sum(len(s.segment.token_ids) for s in run.used if s.status in ("computed", "miss"))
    computed = len(prompt.token_ids) if options.computes_all else len(run.selected) + always
    return Sample(
        seconds,
        token,
        run.watch.load.seconds,
        run.watch.stall.seconds,
        run.bytes_loaded,
        len(run.selected),
        computed,
        of_run(engine.model.config, run, options),
    )


def _theirs(peer: Peer, prompt: Prompt) -> Sample:
    answer = peer.prefill(list(prompt.token_ids))
    return Sample(answer.seconds, answer.token, computed=len(prompt.token_ids))


def _rows(
    engine: BaseEngine, length: int, samples: Mapping[Way, Sequence[Sample]], peers: Sequence[Way]
) -> list[TtftRow]:
    seconds = {way: [sample.seconds for sample in taken] for way, taken in samples.items()}
    full = full_prefill(engine.model.config, length)
    order = [Way("full"), *peers, *(way for way in samples if way.loader is not None)]
    rows = []
    for way in order:
        taken, last = samples[way], samples[way][-1]
        ours, over = way not in peers, paired(seconds[Way("full")], seconds[way])
        limit = speedup(full, last.flops) if last.flops is not None else None
        rows.append(
            TtftRow(
                tokens=length,
                way=way.name,
                policy=way.policy,
                ratio=None if way.ratio is None else float(way.ratio),
                loader=way.loader,
                seconds=tuple(seconds[way]),
                median_s=median(seconds[way]),
                min_s=min(seconds[way]),
                max_s=max(seconds[way]),
                speedup=over.median,
                speedup_min=over.low,
                speedup_max=over.high,
                over_peers={
                    peer.name: paired(seconds[peer], seconds[way]).median
                    for peer in peers
                    if peer != way
                },
                bound=limit.overall if limit else None,
                bound_linear=limit.linear if limit else None,
                bound_attention=limit.attention if limit else None,
                share=over.median / limit.overall if limit else None,
                recomputed=last.recomputed if ours else None,
                computed=last.computed,
                load_s=median(s.load_s for s in taken) if ours else None,
                stall_s=median(s.stall_s for s in taken) if ours else None,
                bytes_loaded=last.bytes_loaded if ours else None,
                first_token=last.token,
            )
        )
    return rows
