"""Which term stands how often in which chunk."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import xxhash

from engine.retrieval.arrays import Array
from engine.retrieval.terms import terms

_BATCH = 2048  # chunks whose terms are in memory at once
_MOST = 2**16 - 1  # times that a term is counted in one chunk


@dataclass(frozen=True)
class Postings:
    """An inverted index over n chunks, p pairs of chunk and term, t terms.

    A term is its 64-bit hash: among a million of them two are the same once in 40 million indexes.

    lengths: uint32 [n], terms of each chunk. terms: uint64 [t], rising. starts: int64 [t + 1],
    where in rows (uint32 [p], which chunk) and counts (uint16 [p], how often) those of each begin.
    """

    lengths: Array
    terms: Array
    starts: Array
    rows: Array
    counts: Array

    @classmethod
    def of(cls, texts: Iterable[str]) -> Postings:
        """The postings of texts, in their order."""
        lengths: list[Array] = []
        parts: list[tuple[Array, Array, Array]] = []
        first = 0
        for batch in _batches(texts):
            sizes, hashes, rows, counts = _count(batch)
            lengths.append(sizes)
            parts.append((hashes, rows + np.uint32(first), counts))
            first += len(sizes)
        pairs = _joined(parts)
        parts.clear()  # with many chunks it is much
        return cls._sorted(np.concatenate(lengths) if lengths else np.zeros(0, np.uint32), pairs)

    @classmethod
    def _sorted(cls, lengths: Array, pairs: tuple[Array, Array, Array]) -> Postings:
        hashes, rows, counts = pairs
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        edges = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
        begins = np.concatenate(([0], edges)) if len(hashes) else edges
        starts = np.concatenate((begins, [len(hashes)])).astype(np.int64)
        return cls(lengths, hashes[begins], starts, rows[order], counts[order])

    def updated(
        self, places: Array, count: int, new: Sequence[int], texts: Iterable[str]
    ) -> Postings:
        """The postings of `count` chunks of which some are here already.

        places: int64, for each chunk here its row among the new ones, or -1 where it's gone. new:
        rows of those that are not here; texts: theirs.
        """
        added = Postings.of(texts)
        moved = np.asarray(new, np.uint32)
        lengths = np.zeros(count, np.uint32)
        kept = places >= 0
        lengths[places[kept]] = self.lengths[kept]
        lengths[moved] = added.lengths
        row = places.astype(np.int32)[self.rows]
        stays = row >= 0
        old = (self._hashes()[stays], row[stays].astype(np.uint32), self.counts[stays])
        del row, stays
        return self._sorted(
            lengths, _joined([old, (added._hashes(), moved[added.rows], added.counts)])
        )

    def _hashes(self) -> Array:
        """The term of every pair."""
        return np.repeat(self.terms, np.diff(self.starts))

    def of_term(self, term: str) -> tuple[Array, Array]:
        """In which chunks a term stands (each once), and how often."""
        wanted = np.uint64(_hash(term))
        at = int(np.searchsorted(self.terms, wanted))
        if at == len(self.terms) or self.terms[at] != wanted:
            return self.rows[:0], self.counts[:0]
        inside = slice(int(self.starts[at]), int(self.starts[at + 1]))
        return self.rows[inside], self.counts[inside]


def _hash(term: str) -> int:
    return xxhash.xxh3_64_intdigest(term.encode("utf-8", "surrogatepass"))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    every = iter(texts)
    while batch := list(islice(every, _BATCH)):
        yield batch


def _count(texts: list[str]) -> tuple[Array, Array, Array, Array]:
    """Terms of each text, and the pairs: hash of the term, number of the text, how often."""
    vocabulary: defaultdict[str, int] = defaultdict()
    vocabulary.default_factory = vocabulary.__len__
    found = array("I")
    sizes = []
    for text in texts:
        row = [vocabulary[term] for term in terms(text)]
        sizes.append(len(row))
        found.extend(row)
    lengths = np.array(sizes, np.uint32)
    numbers = np.frombuffer(found, np.uint32) if found else np.zeros(0, np.uint32)
    rows = np.repeat(np.arange(len(texts), dtype=np.uint64), lengths)
    pairs, counts = np.unique(rows << np.uint64(32) | numbers, return_counts=True)
    hashes = np.fromiter(map(_hash, vocabulary), np.uint64, len(vocabulary))
    return (
        lengths,
        hashes[(pairs & np.uint64(2**32 - 1)).astype(np.int64)],
        (pairs >> np.uint64(32)).astype(np.uint32),
        np.minimum(counts, _MOST).astype(np.uint16),
    )


def _joined(parts: list[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(0, np.uint16)
    hashes, rows, counts = zip(*parts, strict=True)
    return np.concatenate(hashes), np.concatenate(rows), np.concatenate(counts)
