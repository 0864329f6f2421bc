"""What is asked of an engine besides the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from engine.audit import Audit
from engine.compare import FORCED_TOKENS
from engine.observer import Observer
from engine.options import BlendOptions, SamplingOptions
from engine.trace.record import Level


class AskWishes(TypedDict, total=False):
    """What `ask` takes by name; each may be left out.

    blend, sampling: how the prompt is brought to its first token, and the answer drawn.
    compare: also run a full prefill of the same ids.
    audit: do so after the answer where this prompt is due and stored KV was used for it, and log
    how far it was off.
    save (true): chunks that missed are computed again alone and stored, after the answer.
    on_text: gets the answer piece by piece.
    trace: record the run; `full` also measures, after the answer, how far stored KV is from a full
    prefill's, at `trace_layers` (None: a few spread over the model).
    observer: told how it goes on.
    """

    blend: BlendOptions | None
    sampling: SamplingOptions | None
    compare: bool
    audit: Audit | None
    save: bool
    on_text: Callable[[str], None] | None
    trace: Level | None
    trace_layers: Sequence[int] | None
    observer: Observer | None


class Wishes(AskWishes, total=False):
    """What `generate` takes by name: that, and the question as a trace is to show it."""

    question: str | None


@dataclass(frozen=True)
class Asked:
    """`Wishes`, those that were left out filled in."""

    blend: BlendOptions = field(default_factory=BlendOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    compare: bool = False
    audit: Audit | None = None
    save: bool = True
    on_text: Callable[[str], None] | None = None
    trace: Level | None = None
    trace_layers: Sequence[int] | None = None
    question: str | None = None
    observer: Observer | None = None

    @classmethod
    def of(cls, wishes: Wishes) -> Asked:
        given = {name: value for name, value in wishes.items() if value is not None}
        return cls(**given)  # type: ignore[arg-type]

    @property
    def room(self) -> int:
        """Tokens that the answer, and what it is compared along, may take."""
        checked = self.compare or self.audit is not None
        return max(self.sampling.max_tokens, FORCED_TOKENS * checked)
