"""Prompts that quality is measured with: the user's, or made of stored chunks or built-in ones."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

from cache_store.errors import UsageError
from engine.calibration.facts import order_for
from engine.calibration.texts import PASSAGES, QUESTIONS, SUMMARY_TASKS
from engine.evaluation.questions import Passage, Question

Task = Literal["qa", "summary"]
TASKS: tuple[Task, ...] = get_args(Task)
TOGETHER = 4  # passages of a prompt
FEWEST = 8  # stored chunks that prompts can be made of
ASKED_WORDS = 3

_WORD = re.compile(r"[^\W\d_]{4,}")


def check_task(name: str) -> Task:
    """Raises UsageError for a task nobody knows."""
    known = next((task for task in TASKS if task == name), None)
    if known is None:
        raise UsageError(f"task {name!r} is unknown", "use one of " + ", ".join(TASKS))
    return known


def built_in(task: Task, count: int) -> tuple[Question, ...]:
    """So many prompts over the built-in passages, or as many as there are."""
    if task == "qa":
        return tuple(
            Question(
                f"built-in {n}",
                q.text,
                tuple(Passage(PASSAGES[i].chunk, PASSAGES[i].title) for i in order_for(q)),
                (q.answer,),
            )
            for n, q in enumerate(QUESTIONS[:count], 1)
        )
    texts = [(passage.chunk, passage.title) for passage in PASSAGES]
    return tuple(_summary(n, _drawn(texts, n)) for n in range(1, min(count, len(PASSAGES)) + 1))


def of_chunks(
    task: Task, chunks: Sequence[tuple[str, str]], count: int, most: int
) -> tuple[Question, ...]:
    """Prompts over (text, source) chunks, a few at a time; none where there are too few of them.

    qa: what the chunks say about the words that only one of them has. most: characters of a
    prompt's chunks together, which are left out beyond it.
    """
    texts = list(dict(chunks).items())
    if len(texts) < FEWEST:
        return ()
    spread = Counter(word for text, _ in texts for word in set(_words(text)))
    made = []
    for number in range(1, count + 1):
        drawn = _fitting(_drawn(texts, number), most)
        if task == "summary":
            made.append(_summary(number, drawn))
            continue
        about = drawn[number % len(drawn)][0]
        words = sorted(set(_words(about)), key=lambda word: (spread[word], about.find(word)))
        named = ", ".join(words[:ASKED_WORDS])
        if named:
            text = f"What do the documents say about {named}?"
            made.append(_question(number, text, drawn))
    return tuple(made)


def _summary(number: int, texts: Sequence[tuple[str, str]]) -> Question:
    return _question(number, SUMMARY_TASKS[number % len(SUMMARY_TASKS)], texts)


def _question(number: int, text: str, texts: Sequence[tuple[str, str]]) -> Question:
    passages = tuple(Passage(text, source) for text, source in texts)
    return Question(f"prompt {number}", text, passages)


def _drawn(texts: Sequence[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    """A few of the texts in any order, the same ones for the same number."""
    return random.Random(number).sample(texts, min(TOGETHER, len(texts)))


def _fitting(texts: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    kept = [texts[0]]
    for text in texts[1:]:
        if sum(len(t) for t, _ in kept) + len(text[0]) <= most:
            kept.append(text)
    return kept


def _words(text: str) -> list[str]:
    return _WORD.findall(text)
