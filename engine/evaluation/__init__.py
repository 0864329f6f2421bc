"""Answer quality: how close each way of answering comes to a full prefill.

    questions = prepare(read_questions([Path("musique_dev.json")]), passages=4, shuffle=1)
    arms = plan_arms(policies=("value",), ratios=(Decimal("0.05"), Decimal("0.16")))
    results = list(evaluate(engine, questions, arms))  # frozen, one a question, as they are done
    for row in summarise(arms, results):
        print(row.policy, row.ratio, row.kl, row.recovery)

A question is one prompt: a full prefill of it is the reference, its chunks' KV is stored once, and
every arm answers from there.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.evaluation.arms import Arm, plan_arms
    from engine.evaluation.questions import Passage, Question, prepare
    from engine.evaluation.readers import read_questions
    from engine.evaluation.report import summarise
    from engine.evaluation.runner import evaluate

_HOMES = {
    "Arm": "engine.evaluation.arms",
    "plan_arms": "engine.evaluation.arms",
    "Passage": "engine.evaluation.questions",
    "Question": "engine.evaluation.questions",
    "prepare": "engine.evaluation.questions",
    "read_questions": "engine.evaluation.readers",
    "evaluate": "engine.evaluation.runner",
    "summarise": "engine.evaluation.report",
}
__all__ = [
    "Arm",
    "Passage",
    "Question",
    "evaluate",
    "plan_arms",
    "prepare",
    "read_questions",
    "summarise",
]


def __getattr__(name: str) -> Any:
    """Imported on first use: reading a file of questions must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
