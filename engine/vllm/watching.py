"""Full-vocabulary logits of chosen requests, on vLLM's way to their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine.timing import synchronize

PARAMETER = "cacheblend_watch"
"""The key in `SamplingParams.extra_args` of what a request is watched as."""


@dataclass
class Watched:
    """One request. keep: so many first logits are kept; forced: its first tokens, whatever the
    logits are. rows: float32 [vocab] each; first_at: `time.perf_counter` when the first was
    there."""

    keep: int = 1
    forced: Sequence[int] = ()
    rows: list[torch.Tensor] = field(default_factory=list)
    first_at: float = 0.0

    def see(self, step: int, logits: torch.Tensor) -> None:
        """The logits, float32 [vocab], that token `step` is chosen from; they may be changed.

        A step may come again: a prompt that is prefilled piece by piece gets logits for each."""
        if step == 0:
            synchronize(logits.device)
            self.first_at = time.perf_counter()
        if step < self.keep:
            del self.rows[step:]
            self.rows.append(logits.float().clone())
        if step < len(self.forced):
            logits.fill_(float("-inf"))
            logits[self.forced[step]] = 0

    def stacked(self) -> torch.Tensor:
        """float32 [rows, vocab]."""
        return torch.stack(self.rows)


class LogitsWatch(LogitsProcessor):
    """Shows the logits of requests that are watched to what was registered for them; others go by
    untouched. In the process of vLLM's worker only."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.watched: dict[str, Watched] = {}
        self._rows: dict[int, tuple[Watched, Sequence[int]]] = {}  # row -> and its output so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output in batch_update.added:
            name = (params.extra_args or {}).get(PARAMETER)
            self._rows.pop(row, None)
            if name in self.watched:
                self._rows[row] = self.watched[name], output
        for one, other, how in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and how == MoveDirectionality.SWAP:
                self._rows[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (watched, output) in self._rows.items():
            if row < len(logits):
                watched.see(len(output), logits[row])
        return logits
