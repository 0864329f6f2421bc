"""From a score for every chunk to the best of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.retrieval.arrays import Array
from engine.retrieval.corpus import Corpus
from engine.retrieval.hit import ChunkT, Hit


def hits_of(
    corpus: Corpus[ChunkT], ids: Sequence[str], scores: Array, top_k: int
) -> list[Hit[ChunkT]]:
    """The chunks with the highest scores above 0, `top_k` at most; equal ones as they were.

    ids: of all chunks; scores: float32, one for each. What the corpus doesn't want found isn't.
    """
    rows = np.flatnonzero(scores > 0)
    among = corpus.among()
    if among is not None:
        rows = np.array([row for row in rows if ids[row] in among], np.int64)
    rows = rows[np.argsort(-scores[rows], kind="stable")[:top_k]]
    chunks = corpus.chunks([ids[row] for row in rows])
    by_id = {ids[row]: float(scores[row]) for row in rows}
    # A chunk that went since its id was read is not among them.
    return [Hit(chunk, by_id[chunk.chunk_id], rank) for rank, chunk in enumerate(chunks, start=1)]
