"""What goes wrong on one rank goes wrong on all of them, at the same place.

A rank that left a blend while the others compute would leave them waiting for ever. So what can go
wrong on one alone, reading stored KV above all, is kept until all ranks meet.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from cache_store.errors import CacheblendError
from engine.loaders import DamagedSource
from engine.ranks import Ranks

T = TypeVar("T")

PATIENCE = 60.0  # seconds that a rank in trouble waits for the others

_log = logging.getLogger("vllm.cacheblend")


class LostSources(Exception):
    """Entries that turned out unusable on one rank or more. entries: their keys; True: none found
    it damaged, a remote didn't give it or another rank's store doesn't have it."""

    def __init__(self, entries: dict[str, bool]) -> None:
        super().__init__(f"{len(entries)} entries are lost")
        self.entries = entries


class RankFailed(CacheblendError):
    """Something else went wrong, on this rank or another."""


def agree(ranks: Ranks, troubles: Sequence[Exception]) -> None:
    """Where several ranks meet. Returns if none has trouble; otherwise raises LostSources or
    RankFailed on all of them. A rank in trouble to which the others don't come ends its process."""
    said = json.dumps([_said(trouble, ranks) for trouble in troubles]) if troubles else ""
    try:
        heard = ranks.exchanged(said, PATIENCE if troubles else None)
    except TimeoutError as error:
        _log.critical("%s; this worker ends", error, exc_info=next(iter(troubles), error))
        end_process()
    lost: dict[str, bool] = {}
    for rank, words in enumerate(heard):
        for key, elsewhere, message in json.loads(words or "[]"):
            if key is None:
                cause = troubles[0] if troubles else None
                raise RankFailed(f"tensor-parallel rank {rank}: {message}") from cause
            lost[key] = lost.get(key, True) and elsewhere
    if lost:
        raise LostSources(lost)


def end_process() -> NoReturn:
    """At once: the others wait for this rank elsewhere, which nothing but its end ends, for vLLM
    stops when a worker does. In good order it can't, for its groups' threads wait for the others.
    """
    logging.shutdown()
    os._exit(1)


def together(ranks: Ranks, action: Callable[[], T], kept: Sequence[Exception] = ()) -> T:
    """Does something that can go wrong on one rank, and meets the others. kept: troubles that are
    known only afterwards. Raises as `agree`; a rank alone raises its own."""
    if ranks.size == 1:
        return action()
    try:
        result = action()
    except Exception as error:
        agree(ranks, [error])
        raise
    agree(ranks, kept)
    return result


def _said(trouble: Exception, ranks: Ranks) -> tuple[str | None, bool, str]:
    if isinstance(trouble, DamagedSource):
        elsewhere = trouble.lost or (trouble.gone and not ranks.leads)
        return trouble.key, elsewhere, trouble.message
    return None, False, str(trouble) or type(trouble).__name__
