"""What is searched, what searches, and what is found."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cache_store.errors import UsageError


class SearchableChunk(Protocol):
    """What a chunk must have to be searched."""

    @property
    def chunk_id(self) -> str: ...

    @property
    def text(self) -> str: ...


ChunkT = TypeVar("ChunkT", bound=SearchableChunk)


@dataclass(frozen=True)
class Hit(Generic[ChunkT]):
    """A chunk that fits a question; `rank` counts from 1. What `score` means is the retriever's
    own: more is better, and 0 is nothing at all."""

    chunk: ChunkT
    score: float
    rank: int


class Retriever(Protocol[ChunkT]):
    """Finds chunks for questions; made over chunks once, and asked any number of times."""

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """The chunks that fit the question, best first, each once, `top_k` at most; none where
        nothing does. Raises UsageError for a `top_k` below 1."""
        ...


def check_top_k(top_k: int) -> None:
    """Raises UsageError for a `top_k` below 1."""
    if top_k < 1:
        raise UsageError(
            f"top-k is {top_k}: a search gives at least one chunk", "give --top-k 1 or more"
        )
