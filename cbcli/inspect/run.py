"""A trace with what is worked out from it once: segments by number, scores by position, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cbcli.inspect.reuse import reuse_seconds
from engine.trace.record import Trace

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Segment:
    """A part of the prompt. number: of a chunk, from 1; 0 for the others."""

    kind: str
    number: int
    chunk_id: str | None
    source: str | None
    start: int
    end: int
    status: str

    @property
    def name(self) -> str:
        if self.kind != "chunk":
            return {"prefix": "beginning", "suffix": "question"}.get(self.kind, self.kind)
        return Path(self.source).name if self.source else (self.chunk_id or "chunk")[:12]

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Measure:
    """A number for each token. values float32 [N]: NaN where there is none."""

    title: str
    unit: str
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Run:
    """One trace, as the views take it."""

    trace: Trace
    others: Callable[[], Iterable[Trace]] = tuple  # runs it may be set beside

    @cached_property
    def reuse_s(self) -> float | None:
        """Seconds to first token of reuse on this prompt; None where that isn't known."""
        return reuse_seconds(self.trace, self.others())

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        found: list[Segment] = []
        number = 0
        for raw in self.trace.result["prompt"]["segments"]:
            number += raw["kind"] == "chunk"
            found.append(
                Segment(
                    raw["kind"],
                    number if raw["kind"] == "chunk" else 0,
                    raw["chunk_id"],
                    raw["source"],
                    raw["start"],
                    raw["end"],
                    raw["status"],
                )
            )
        return tuple(segment for segment in found if segment.tokens > 0)

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return np.array([segment.start for segment in self.segments])

    def segment_of(self, token: int) -> Segment:
        return self.segments[self.segment_index(token)]

    def segment_index(self, token: int) -> int:
        return max(0, int(np.searchsorted(self._starts, token, side="right")) - 1)

    @cached_property
    def chunks(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.kind == "chunk")

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return len(self.trace.tokens.ids)

    @cached_property
    def cached(self) -> Mask:
        """Which tokens had their KV loaded."""
        mask = np.zeros(self.count, dtype=bool)
        for segment in self.chunks:
            if segment.status in ("exact", "hit"):
                mask[segment.start : segment.end] = True
        return mask

    @cached_property
    def selected(self) -> Mask:
        """Which cached tokens were computed to the last layer."""
        mask = np.zeros(self.count, dtype=bool)
        mask[self.trace.selected] = True
        return mask

    @cached_property
    def ranks(self) -> tuple[npt.NDArray[np.int32], ...]:
        """For every stage the rank of each token by its score, from 1; 0 where it has none. Of
        equal scores the first token is ahead, as in selecting."""
        found = []
        for stage in self.trace.stages:
            ranks = np.zeros(self.count, dtype=np.int32)
            order = np.argsort(-stage.scores, kind="stable")
            ranks[stage.positions[order]] = np.arange(1, len(order) + 1)
            found.append(ranks)
        return tuple(found)

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """What tokens can be coloured by, the policy's own score first."""
        trace, found = self.trace, []
        for stage in trace.stages:
            at = f"layer {stage.layer}" if stage.layer else "before layer 0"
            title = f"score at {at}" if stage.layer or len(trace.stages) > 1 else "score"
            found.append(Measure(title, "", self._spread(stage.positions, stage.scores)))
        if trace.attention is not None and trace.attention_positions is not None:
            mean = trace.attention.mean(axis=0) if len(trace.attention) else None
            if mean is not None:
                title = "question's attention, mean over layers"
                found.append(Measure(title, "", self._spread(trace.attention_positions, mean)))
        if trace.deviations is not None and len(trace.deviations.layers):
            for name, rows in (("K", trace.deviations.k), ("V", trace.deviations.v)):
                title = f"deviation of {name}, mean over layers"
                where = trace.deviations.positions
                found.append(Measure(title, "", self._spread(where, rows.mean(axis=0))))
        return tuple(found)

    def _spread(
        self, positions: npt.NDArray[np.int32], values: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        spread = np.full(self.count, np.nan, dtype=np.float32)
        spread[positions] = values
        return spread

    @property
    def result(self) -> Mapping[str, Any]:
        return self.trace.result

    @cached_property
    def way(self) -> str:
        """What was done, in a few words: `blend question 0.16`."""
        result = self.result
        if result["skipped_blend"]:
            return "full prefill (too short to blend)"
        if result["mode"] != "blend":
            return "full prefill" if result["mode"] == "full" else str(result["mode"])
        ratios: Sequence[float] = result["ratios"]
        threshold = result.get("threshold")
        much = ",".join(f"{ratio:g}" for ratio in ratios)
        if threshold is not None:
            much = f"threshold {threshold:g}"
        return f"blend {result['policy']} {much}".rstrip()

    @property
    def layers(self) -> int:
        return self.trace.layers


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def number_text(value: float) -> str:
    """A score with three digits: 0.00123, 4.56, 1.2e+05."""
    return "-" if np.isnan(value) else f"{value:.3g}"


def ms(seconds: float) -> str:
    """Milliseconds, with a digit behind the point where they are few."""
    value = seconds * 1000
    return f"{value:,.0f} ms" if abs(value) >= 99.95 else f"{value:.1f} ms"
