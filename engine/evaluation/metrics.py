"""Scores of an answer against those that are right: F1 of words, or ROUGE-L."""

import importlib.util
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

from cache_store.errors import UsageError
from engine.evaluation.questions import Question

Metric = Literal["f1", "rouge-l"]
METRICS: tuple[Metric, ...] = get_args(Metric)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def choose_metric(questions: Sequence[Question], wanted: str | None = None) -> Metric | None:
    """The metric that fits the questions, or the one that is wanted; None without any answers.

    A question with several lines is a text to be summarised, and so ROUGE-L's. Raises UsageError
    for a metric nobody knows, for one without answers to score by, and where ROUGE-L is not
    installed.
    """
    known = next((name for name in METRICS if name == wanted), None)
    if wanted is not None and known is None:
        raise UsageError(f"metric {wanted!r} is unknown", "use one of " + ", ".join(METRICS))
    scored = [question for question in questions if question.answers]
    if not scored:
        if wanted is not None:
            raise UsageError("no question has answers to score by", "leave out --metric")
        return None
    if known is None:
        long = sum("\n" in question.text.strip() for question in scored)
        known = "rouge-l" if 2 * long > len(scored) else "f1"
    if known == "rouge-l" and importlib.util.find_spec("rouge_score") is None:
        raise UsageError(
            "ROUGE-L needs rouge-score", "pip install 'cacheblend[eval]', or --metric f1"
        )
    return known


def score(metric: Metric, answer: str, right: Sequence[str]) -> float:
    """From 0 to 1: the answer's first line against the right answer it fits best."""
    line = first_line(answer)
    one: Callable[[str, str], float] = f1 if metric == "f1" else rouge_l
    return max(one(line, text) for text in right)


def first_line(text: str) -> str:
    """The first line that has something in it: small models run on below their answer."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def normalised(text: str) -> str:
    """As SQuAD compares: lower case, no punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall over the words that both have."""
    ours, theirs = normalised(answer).split(), normalised(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def rouge_l(answer: str, right: str) -> float:
    """F-measure of the longest common subsequence of stemmed words."""
    return float(_rouge().score(right, answer)["rougeL"].fmeasure)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
