"""Loading: what each loader reads, waits for and costs, at the disk's own rate and slower ones."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from statistics import median
from typing import Literal

from engine.api import Engine
from engine.bench.layout import standard_length, standard_prompt, stored, text_ids
from engine.bench.measure import in_turn, paired, telling
from engine.loaders import LOADER_NAMES
from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.throttle import ThrottledStore

Bandwidth = int | Literal["balanced"] | None
"""Bytes a second, None without a limit, or where reading takes as long as computing does."""


@dataclass(frozen=True)
class LoadSweep:
    """Every loader at every bandwidth, on one blend."""

    tokens: int = 4096
    loaders: tuple[str, ...] = LOADER_NAMES
    bandwidths: tuple[Bandwidth, ...] = (None, "balanced")
    policy: str = "value"
    ratio: Decimal = Decimal("0.16")
    pairs: int = 5

    def check(self, layers: int, context: int) -> None:
        """Raises UsageError for what the model cannot do, before anything is measured."""
        standard_length(self.tokens, context)
        for loader in self.loaders:
            self.options(loader).check_model(layers)

    def options(self, loader: str) -> BlendOptions:
        return BlendOptions.of(policy=self.policy, ratio=self.ratio, min_tokens=0, loader=loader)


@dataclass(frozen=True)
class LoadRow:
    """bandwidth: bytes/s the reader was held to, None for none; balanced: chosen so that reading
    takes as long as computing. stall_share: this loader's stall time over the load time of
    `sync`, paired round by round (None where `sync` was not measured)."""

    loader: str
    bandwidth: float | None
    balanced: bool
    tokens: int
    seconds: tuple[float, ...]
    median_s: float
    load_s: float
    stall_s: float
    stall_share: float | None
    bytes_loaded: int


@dataclass(frozen=True)
class _Sample:
    seconds: float
    load_s: float
    stall_s: float
    bytes_loaded: int


def measure_load(
    engine: Engine, sweep: LoadSweep, text: str | None, on_round: Callable[[str], None]
) -> list[LoadRow]:
    """The standard prompt, blended by every loader at every bandwidth.

    Raises UsageError for options and prompts the model has no room for.
    """
    length = standard_length(sweep.tokens, engine.model.config.context)
    prompt = standard_prompt(text_ids(engine.tokenizer, length, text))
    rows: list[LoadRow] = []
    on_round(f"{length} tokens: storing chunks")
    with stored(engine, prompt) as over:
        for wanted in sweep.bandwidths:
            rate = _balance(over, prompt, sweep) if wanted == "balanced" else wanted
            reader = over if rate is None else _throttled(over, rate)
            ways = {
                name: partial(_run, reader, prompt, sweep.options(name)) for name in sweep.loaders
            }
            label = "as fast as it goes" if rate is None else f"{rate / 1e6:,.0f} MB/s"
            taken = in_turn(ways, sweep.pairs, telling(on_round, label, sweep.pairs))
            rows += [
                _row(name, rate, wanted == "balanced", length, samples, taken.get("sync"))
                for name, samples in taken.items()
            ]
    return rows


def _throttled(engine: Engine, bytes_per_s: float) -> Engine:
    if engine.store is None:
        raise ValueError("loading is measured from a store")
    store = ThrottledStore(engine.store, bytes_per_s)
    return Engine(engine.model, engine.blueprint, store=store)


def _balance(engine: Engine, prompt: Prompt, sweep: LoadSweep) -> float:
    """Bytes a second at which reading this prompt's KV takes as long as computing it."""
    samples = [_run(engine, prompt, sweep.options("sync")) for _ in range(4)][1:]
    return samples[-1].bytes_loaded / median(s.seconds - s.load_s for s in samples)


def _run(engine: Engine, prompt: Prompt, options: BlendOptions) -> _Sample:
    began = time.perf_counter()
    run = engine.prefill(prompt, options)
    run.logits.argmax().item()
    seconds = time.perf_counter() - began
    watch = run.watch
    return _Sample(seconds, watch.load.seconds, watch.stall.seconds, run.bytes_loaded)


def _row(
    loader: str,
    bandwidth: float | None,
    balanced: bool,
    tokens: int,
    samples: Sequence[_Sample],
    sync: Sequence[_Sample] | None,
) -> LoadRow:
    stalls = [s.stall_s for s in samples]
    return LoadRow(
        loader,
        bandwidth,
        balanced,
        tokens,
        tuple(s.seconds for s in samples),
        median(s.seconds for s in samples),
        median(s.load_s for s in samples),
        median(stalls),
        paired(stalls, [s.load_s for s in sync]).median if sync else None,
        samples[-1].bytes_loaded,
    )
