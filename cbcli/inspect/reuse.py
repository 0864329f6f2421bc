"""What plain reuse of the stored KV took on the same prompt, where such a run is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from cache_store.errors import CacheblendError
from cbcli.traces import traces_root
from engine.trace.record import Trace

MOST = 20  # kept traces that are looked into


def reuse_seconds(trace: Trace, others: Iterable[Trace]) -> float | None:
    """Seconds to first token of the first run with reuse among `others` that had the same model,
    on the same device, and the same tokens; None where there is none."""
    if trace.reuse_ttft_s is not None:
        return trace.reuse_ttft_s
    model, ids = trace.result["model"], trace.tokens.ids
    for other in others:
        same = other.result["mode"] == "reuse" and other.result["model"] == model
        if same and np.array_equal(other.tokens.ids, ids):
            return float(other.result["timing"]["ttft_s"])
    return None


def known_runs(shown: Sequence[Trace]) -> Iterator[Trace]:
    """The traces that are shown, and then the kept ones of runs with reuse, the newest first."""
    return chain(shown, _kept())


def _kept() -> Iterator[Trace]:
    from engine.trace.file import is_of_mode, read
    from engine.trace.kept import kept

    for path in kept(traces_root())[:MOST]:
        if is_of_mode(path, "reuse"):
            try:
                yield read(path)
            except (CacheblendError, OSError):  # nobody asked for this one
                continue
