"""What asks a question anew. The view knows this protocol alone; an engine is loaded by the first
run, in a thread of its own, never by looking at a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.trace.record import Trace

POLICIES = ("question", "value", "key", "key+value", "attention", "first-k", "hybrid", "random")
CONTEXTS = ("prefix", "bos", "none")


@dataclass(frozen=True)
class Wish:
    """What to run. chunks: ids in their order, none for those the question retrieves; ratio 0 to 1;
    check_layer from 1 on; compare: also run a full prefill."""

    question: str
    chunks: tuple[str, ...] = ()
    ratio: float = 0.16
    policy: str = "question"
    check_layer: int = 1
    context: str = "prefix"
    compare: bool = True


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of the store. size: bytes of its KV, hits: times it was used, over all entries."""

    chunk_id: str
    source: str
    ordinal: int
    tokens: int
    size: int
    hits: int
    text: str


class Cancelled(Exception):
    """Raised out of `say`, where nobody waits for the run any more."""


class Runner(Protocol):
    """Runs questions. All calls come from one thread, one after the other; both raise
    CacheblendError."""

    def chunks(self) -> Sequence[StoredChunk]:
        """All chunks of the store, in the documents' order."""

    def run(self, wish: Wish, say: Callable[[str], None]) -> Trace:
        """The trace of a run. say: told what goes on, again and again; it may raise Cancelled."""
