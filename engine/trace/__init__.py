"""The record of one run: what was in the prompt, what was recomputed and why, where time went."""

from engine.trace.record import (
    AnswerToken,
    Deviations,
    LayerSpan,
    Phase,
    Stage,
    TokenTable,
    Trace,
)

__all__ = ["AnswerToken", "Deviations", "LayerSpan", "Phase", "Stage", "TokenTable", "Trace"]
