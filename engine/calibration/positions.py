"""Whether a model's RoPE is what it was trained with, by the likelihood of text.

A wrong theta or scaling is wrong on both sides of every identity. What it can't hide from is text:
late in a long sequence it gets unlikely, and another theta or scaling makes it likelier.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from engine.api import Engine
from engine.calibration.outcome import GateCheck
from engine.calibration.texts import PASSAGES
from engine.forward import forward
from engine.rope import Rope, Rows, Tables, inverse_frequencies

SCORED = 2  # passages whose likelihood is compared, early and late
LAST = 768  # tokens at the end of everything that the declared RoPE is judged by
UNSCORED = 16  # first tokens of a text, which nothing leads up to
SURE = 3.0  # standard errors that a difference must be away from chance
# Nats a token. Measured with the default model in bf16: late text is 0.33 likelier than early text,
# and with a tenth of its theta 2.7 less likely. The best of the other RoPEs is 0.24 behind the
# declared one; where another was declared (theta ten times up or down, frequencies halved or
# doubled), the best is 0.24 to 1.9 ahead. Theta wrong by no more than three times isn't noticed.
LATE_LIMIT = 0.3
BETTER_LIMIT = 0.05
MOVED_LIMIT = {"fp32": 0.01, "fp16": 0.05, "bf16": 0.05}


@dataclass(frozen=True)
class _Other:
    """Another RoPE than the declared one: theta and all frequencies, multiplied."""

    name: str
    theta: float = 1.0
    frequencies: float = 1.0


OTHERS = (
    _Other("a tenth of the theta", theta=0.1),
    _Other("ten times the theta", theta=10.0),
    _Other("half the frequencies", frequencies=0.5),
    _Other("twice the frequencies", frequencies=2.0),
)


class Positions:
    """The checks. One sequence holds all built-in passages, the ones scored at its end; tokens: as
    many of it as are used, beside the context's limit."""

    def __init__(self, engine: Engine, tokens: int = 1_000_000) -> None:
        self.engine = engine
        texts = [list(engine.tokenizer.encode(p.chunk + "\n\n")) for p in PASSAGES]
        self.scored = [token for text in texts[:SCORED] for token in text]
        filler = [token for text in texts[SCORED:] for token in text]
        most = min(tokens, engine.model.config.context - 1)
        self.scored = self.scored[:most]
        self.filler = filler[: most - len(self.scored)]

    def __call__(self) -> Iterator[GateCheck]:
        yield self.late()
        yield self.moved()
        yield self.others()

    def late(self) -> GateCheck:
        """The same text behind nothing and behind all the others."""
        value, sure = _paired(self.declared[-len(self.early) :] - self.early)
        return GateCheck(
            "late text",
            value if sure else min(value, 0.0),
            LATE_LIMIT,
            f"nats a token that text loses behind {len(self.filler)} other tokens",
        )

    def moved(self) -> GateCheck:
        """The same text with nothing before it, at later positions: rotation is relative."""
        engine, count = self.engine, len(self.scored)
        by = len(self.filler)
        regimes = {engine.model.rope.regime(n) for n in (count, by + count)}
        if len(regimes) > 1:
            # Another length has other frequencies here: there is nothing to be equal.
            return GateCheck("moved text", 0.0, 0.0, "this RoPE depends on length: not compared")
        tables = engine.model.rope.tables(by + count)
        moved = self._losses(self.scored, tables[by : by + count])
        value = float((moved - self.early).mean().abs())
        return GateCheck(
            "moved text",
            value,
            MOVED_LIMIT[engine.info.dtype],
            f"nats a token that text changes by at positions from {by} on",
        )

    def others(self) -> GateCheck:
        """The end of the whole sequence under the declared RoPE and others."""
        ids = self.filler + self.scored
        kinds = range(len(self.engine.model.rope.tables(1).kinds))
        best, name = -math.inf, ""
        for kind, other in ((kind, other) for kind in kinds for other in OTHERS):
            losses = self._losses(ids, self._tables(kind, other, len(ids)))
            gain, sure = _paired(self.declared - losses)
            gain = gain if sure else min(gain, 0.0)
            if gain > best:
                best, name = gain, other.name + (" in layers with a window" if kind else "")
        return GateCheck(
            "declared RoPE",
            best,
            BETTER_LIMIT,
            f"nats a token that text gains with another RoPE; the best has {name}",
        )

    @cached_property
    def early(self) -> torch.Tensor:
        """Losses of the scored passages behind nothing."""
        return self._losses(self.scored)

    @cached_property
    def declared(self) -> torch.Tensor:
        """Losses of the end of the whole sequence."""
        return self._losses(self.filler + self.scored)

    @torch.inference_mode()
    def _losses(self, ids: Sequence[int], tables: Tables | None = None) -> torch.Tensor:
        """-log p of each of the last tokens but a text's first ones, float32."""
        model, count = self.engine.model, min(LAST, len(ids) - UNSCORED)
        tables = model.rope.tables(len(ids)) if tables is None else tables
        logits = forward(model, model.new_cache(len(ids)), ids, tables, last=count + 1)
        wanted = torch.tensor(ids[-count:], device=model.device)
        return F.cross_entropy(logits[:-1], wanted, reduction="none").cpu()

    def _tables(self, kind: int, other: _Other, length: int) -> Tables:
        """The declared ones, but one kind's."""
        model = self.engine.model
        declared = model.rope.tables(length)
        kinds = list(declared.kinds)
        kinds[kind] = _rows(model.rope, kind, other, length)
        return replace(declared, kinds=tuple(kinds))


def _rows(rope: Rope, kind: int, other: _Other, length: int) -> Rows:
    """cos and sin as `Rope.tables` has them, for another RoPE."""
    declared = rope.kinds[kind]
    theta = replace(declared, theta=declared.theta * other.theta)
    frequencies, scale = inverse_frequencies(theta, rope.dim, rope.max_positions, length)
    angles = torch.outer(torch.arange(length).float(), frequencies * other.frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1).to(rope.device), torch.cat([-sin, sin], -1).to(rope.device)


def _paired(differences: torch.Tensor) -> tuple[float, bool]:
    """The mean, and whether it is above zero by more than chance."""
    mean = float(differences.mean())
    error = float(differences.std()) / math.sqrt(len(differences))
    return mean, mean > SURE * error
