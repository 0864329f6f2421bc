"""Prompts that quality is measured with: the user's, or made of stored chunks or built-in ones."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from cache_store.catalog import ChunkInfo
from engine.calibration.facts import order_for
from engine.calibration.texts import PASSAGES, QUESTIONS, SUMMARY_TASKS
from engine.evaluation.questions import Passage, Question
from engine.task import Task

TOGETHER = 4  # passages of a prompt
FEWEST = 8  # stored chunks that prompts can be made of
ASKED_WORDS = 3

T = TypeVar("T")
_WORD = re.compile(r"[^\W\d_]{4,}")


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
    texts = [Passage(passage.chunk, passage.title) for passage in PASSAGES]
    return tuple(_summary(n, _drawn(texts, n)) for n in range(1, min(count, len(PASSAGES)) + 1))


def of_chunks(
    task: Task, chunks: Sequence[ChunkInfo], count: int, most: int
) -> tuple[Question, ...]:
    """Prompts over stored chunks, a few at a time; none where there are too few of them.

    qa: what the chunks say about the words that only one of them has. most: tokens of a prompt's
    chunks together; those that go beyond it are left out, and prompts that none is left for.
    """
    chunks = list({chunk.text: chunk for chunk in chunks}.values())
    if len(chunks) < FEWEST:
        return ()
    spread = Counter(word for chunk in chunks for word in set(_words(chunk.text)))
    made = []
    for number in range(1, count + 1):
        fitting = _fitting(_drawn(chunks, number), most)
        drawn = [Passage(chunk.text, chunk.source) for chunk in fitting]
        if not drawn:
            continue
        if task == "summary":
            made.append(_summary(number, drawn))
            continue
        about = drawn[number % len(drawn)].text
        words = sorted(set(_words(about)), key=lambda word: (spread[word], about.find(word)))
        named = ", ".join(words[:ASKED_WORDS])
        if named:
            text = f"What do the documents say about {named}?"
            made.append(_question(number, text, drawn))
    return tuple(made)


def _summary(number: int, passages: Sequence[Passage]) -> Question:
    return _question(number, SUMMARY_TASKS[number % len(SUMMARY_TASKS)], passages)


def _question(number: int, text: str, passages: Sequence[Passage]) -> Question:
    return Question(f"prompt {number}", text, tuple(passages))


def _drawn(texts: Sequence[T], number: int) -> list[T]:
    """A few of the texts in any order, the same ones for the same number."""
    return random.Random(number).sample(texts, min(TOGETHER, len(texts)))


def _fitting(chunks: Sequence[ChunkInfo], most: int) -> list[ChunkInfo]:
    kept: list[ChunkInfo] = []
    for chunk in chunks:
        if sum(other.tokens for other in kept) + chunk.tokens <= most:
            kept.append(chunk)
    return kept


def _words(text: str) -> list[str]:
    return _WORD.findall(text)
