"""Measures the speed with a model's own weights, and its KV's on the way to it."""

import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch

from engine.api import Engine
from engine.calibration.ground import Ground
from engine.calibration.speed import Speed, here
from engine.diskprobe import probe_disk
from engine.forward import forward
from engine.options import BlendOptions
from engine.policies import RANDOM
from engine.prompt import Prompt
from engine.timing import synchronize

LENGTHS = (512, 1024, 2048)  # of full prefills
CHUNKS = (6, 18)  # of blends
RATIOS = ("0.05", "0.16", "0.3", "0.6")
RUNS = 2  # of which the faster counts
QUESTION = "What are these texts about?"


def measure_speed(where: Ground, folder: Path) -> Speed:
    """Some seconds of full prefills, blends of the built-in passages, and reading files in the
    folder of the store."""
    engine = where.engine
    c = engine.model.config
    ids = [token for n in range(4) for token in _some_ids(engine, n)]
    lengths = [n for n in LENGTHS if n < min(c.context, len(ids))] or [min(64, c.context - 1)]
    prefill = tuple((n, n / _fastest(engine, ids[:n])) for n in lengths)
    fixed, token, pair = _fit(*_blends(where))
    disk = probe_disk(folder)
    return Speed(
        here(engine.model.device),
        torch.get_num_threads(),
        prefill,
        fixed,
        token,
        pair,
        where.stored.token_bytes / c.layers,
        disk.warm,
        disk.cold,
    )


def _some_ids(engine: Engine, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(engine.model.config.vocab, (1024,), generator=generator).tolist()


def _fastest(engine: Engine, ids: Sequence[int]) -> float:
    model, times = engine.model, []
    for _ in range(RUNS):
        began = time.perf_counter()
        forward(model, model.new_cache(len(ids)), ids, model.rope.tables(len(ids)))
        synchronize(model.device)
        times.append(time.perf_counter() - began)
    return min(times)


def _blends(where: Ground) -> tuple[list[tuple[float, int]], list[float]]:
    """(tokens computed, tokens of the prompt) and the seconds of a layer, for several blends whose
    tokens are chosen without any work."""
    shapes: list[tuple[float, int]] = []
    seconds: list[float] = []
    layers = where.engine.model.config.layers
    for prompt in _prompts(where):
        length = len(prompt.token_ids)
        for ratio in RATIOS:
            options = BlendOptions.of(policy=RANDOM, ratio=Decimal(ratio), min_tokens=0)
            runs = [where.prefill(prompt, options) for _ in range(RUNS)]
            always = sum(
                len(s.segment.token_ids) for s in runs[0].used if s.status in ("computed", "miss")
            )
            shapes.append((always + len(runs[0].selected), length))
            # Where the host doesn't wait for the device, only the whole is known.
            on_host = where.engine.model.device.type == "cpu"
            times = [r.watch.recompute.seconds if on_host else r.ttft_s for r in runs]
            seconds.append(min(times) / layers)
    return shapes, seconds


def _prompts(where: Ground) -> list[Prompt]:
    prompts = [where.prompt(QUESTION, range(count - 1, -1, -1)) for count in CHUNKS]
    context = where.engine.model.config.context
    return [p for p in prompts if len(p.token_ids) < context] or [where.prompt(QUESTION, (1, 0))]


def _fit(
    shapes: Sequence[tuple[float, int]], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """Least squares over terms none of which may be below zero: the one furthest below is left out,
    until none is."""
    terms = np.array([[1.0, n, n * total] for n, total in shapes])
    kept = [0, 1, 2]
    while kept:
        found = np.linalg.lstsq(terms[:, kept], np.array(seconds), rcond=None)[0]
        if (found >= 0).all():
            result = np.zeros(3)
            result[kept] = found
            return float(result[0]), float(result[1]), float(result[2])
        kept.pop(int(found.argmin()))
    return 0.0, 0.0, 0.0
