"""What a trace holds. Plain numbers and NumPy arrays: reading one needs no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

VERSION = 1
Level = Literal["basic", "full"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TokenTable:
    """The prompt's N tokens. ids int32 [N]; text: the bytes of all of them, one after the other;
    ends int32 [N]: where each one's bytes end in `text` (the first begins at 0). A token may be a
    part of a character, or no byte at all. computed int16 [N]: in how many layers, counted from
    layer 0, the token's K and V were computed; 0: none, the number of layers: all."""

    ids: Ints
    text: bytes
    ends: Ints
    computed: npt.NDArray[np.int16]

    def span(self, index: int) -> tuple[int, int]:
        """Where a token's bytes are in `text`."""
        return (int(self.ends[index - 1]) if index else 0), int(self.ends[index])


@dataclass(frozen=True)
class Stage:
    """One selection. layer: the check layer, 0 where the tokens were chosen before any was
    computed; positions int32 [n]: the cached tokens scored; scores float32 [n]; chosen: how many
    stayed (those with the highest scores, of equal ones the first)."""

    layer: int
    positions: Ints
    scores: Floats
    chosen: int

    def selected(self) -> Ints:
        """The positions that stayed, in order."""
        order = np.argsort(-self.scores, kind="stable")[: self.chosen]
        return np.sort(self.positions[order])


@dataclass(frozen=True)
class Deviations:
    """KV deviation of cached tokens from full prefill's, layer by layer. layers: which, M of them;
    positions int32 [n]; k, v float32 [M, n]: squared L2 distance of K (before RoPE) and of V."""

    layers: tuple[int, ...]
    positions: Ints
    k: Floats
    v: Floats


@dataclass(frozen=True)
class LayerSpan:
    """Seconds of one layer.

    start_s: since the prefill's start, when its tokens' turn to be computed came; load_s: reading
    its KV, in whichever thread, beginning at load_start_s; stall_s: waiting for it; rotate_s:
    placing it in the KV cache; score_s: scoring and selecting, or the question reading;
    recompute_s: computing tokens. A part that was not in this layer is 0.

    Stall, rotate, score and recompute follow one another from start_s (with loader `sync` all
    stalls were before the first layer). Where the question read the
    stored KV before anything was computed, read_start_s is when it came to this layer, and all but
    recompute follow from there; None elsewhere.
    """

    start_s: float
    load_start_s: float
    load_s: float
    stall_s: float
    rotate_s: float
    score_s: float
    recompute_s: float
    read_start_s: float | None = None


@dataclass(frozen=True)
class Phase:
    """A part of the run, in seconds since the prefill's start (before it: negative). name: "open",
    "tokenize", "retrieve", "find", "read question", "layers", "logits", "decode", "compare"."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class AnswerToken:
    """One token of the answer, or of full prefill's where compared. kl: KL(full || this run) in
    nats, teacher-forced along full prefill's answer; None where that isn't known."""

    id: int
    text: str
    kl: float | None = None


@dataclass(frozen=True)
class Trace:
    """One run of a prompt, as `ask` made it.

    id: its name, which sorts by time; created: seconds since the epoch; question: as it was asked;
    result: the JSON of `ask --json` (schema 1): model, settings, segments, timings, comparison.
    spans: one a layer, none where the run had no layers of its own. attention float32 [layers, n]
    with attention_layers and attention_positions: each cached token's share of what the question
    looked at in a layer, so that a row adds up to 1, where the policy asked it; None elsewhere.
    deviations: of level `full` alone. bound: the least
    share of full prefill's time by counting operations, None where it isn't known. reference:
    full prefill's answer, where compared; its KL at each token.
    """

    id: str
    created: float
    level: Level
    question: str
    result: Mapping[str, Any]
    layers: int
    tokens: TokenTable
    stages: tuple[Stage, ...]
    spans: tuple[LayerSpan, ...]
    phases: tuple[Phase, ...]
    answer: tuple[AnswerToken, ...]
    reference: tuple[AnswerToken, ...] = ()
    attention_layers: tuple[int, ...] = ()
    attention_positions: Ints | None = None
    attention: Floats | None = None
    deviations: Deviations | None = None
    bound: float | None = None
    reuse_ttft_s: float | None = None
    version: int = field(default=VERSION)

    @property
    def selected(self) -> Ints:
        """Positions of cached tokens that were computed in the last layer, in order."""
        cached = np.zeros(len(self.tokens.ids), dtype=bool)
        for segment in self.result["prompt"]["segments"]:
            if segment["kind"] == "chunk" and segment["status"] in ("hit", "exact"):
                cached[segment["start"] : segment["end"]] = True
        return np.flatnonzero(cached & (self.tokens.computed == self.layers)).astype(np.int32)
