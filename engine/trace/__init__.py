"""The record of one run: what was in the prompt, what was recomputed and why, where time went."""

from engine.trace.export import to_json
from engine.trace.file import SUFFIX, read, write
from engine.trace.kept import keep, kept
from engine.trace.record import (
    AnswerToken,
    Deviations,
    LayerSpan,
    Phase,
    Stage,
    TokenTable,
    Trace,
)

__all__ = [
    "SUFFIX",
    "AnswerToken",
    "Deviations",
    "LayerSpan",
    "Phase",
    "Stage",
    "TokenTable",
    "Trace",
    "keep",
    "kept",
    "read",
    "to_json",
    "write",
]
