"""Questions to evaluate with: what a reader makes of a file, and how they are prepared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from cache_store.errors import UsageError


@dataclass(frozen=True)
class Passage:
    """The text of one chunk, and what it is called."""

    text: str
    source: str | None = None


@dataclass(frozen=True)
class Question:
    """name: for people, such as "musique_dev.json:3"; answers: any of them is right; none where
    there is nothing to score an answer by."""

    name: str
    text: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()


def digest(questions: Sequence[Question]) -> str:
    """32 hex digits over all that an evaluation takes from the questions, in their order."""
    hasher = blake3()
    for question in questions:
        parts = (question.text, *(p.text for p in question.passages), "", *question.answers)
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(8, "little") + data)
        hasher.update(b"\xff")
    return hasher.hexdigest()[:32]


def prepare(
    questions: Sequence[Question],
    *,
    limit: int | None = None,
    passages: int | None = None,
    shuffle: int | None = None,
) -> tuple[Question, ...]:
    """The first `limit` questions with their first `passages` passages each, those shuffled.

    shuffle: a seed; the order of a question depends on it and on its place alone, so that it stays
    when the limit changes. Raises UsageError for a question with fewer passages than asked for.
    """
    chosen = questions if limit is None else questions[:limit]
    return tuple(_prepared(q, place, passages, shuffle) for place, q in enumerate(chosen))


def _prepared(
    question: Question, place: int, passages: int | None, shuffle: int | None
) -> Question:
    kept = list(question.passages)
    if passages is not None:
        if len(kept) < passages:
            raise UsageError(
                f"{question.name} has {len(kept)} passages, {passages} are asked for",
                f"use --passages {len(kept)} or fewer",
            )
        kept = kept[:passages]
    if shuffle is not None:
        random.Random(f"{shuffle}:{place}").shuffle(kept)
    return replace(question, passages=tuple(kept))
