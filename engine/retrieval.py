"""Which chunks a question is about: BM25 over the words the two have in common."""

import logging
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

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
    """A chunk that shares words with the question; `rank` counts from 1, `score` is above 0."""

    chunk: ChunkT
    score: float
    rank: int


class Retriever(Generic[ChunkT]):
    """An index over chunks, built once and searched any number of times.

    Chunks with the same `chunk_id` are the same text: the first stands for all of them, so that
    a text found in two documents doesn't fill two places of the prompt.
    """

    def __init__(self, chunks: Sequence[ChunkT]) -> None:
        first_of_id: dict[str, ChunkT] = {}
        for chunk in chunks:
            first_of_id.setdefault(chunk.chunk_id, chunk)
        vocabulary: defaultdict[str, int] = defaultdict()
        vocabulary.default_factory = vocabulary.__len__
        self._chunks: list[ChunkT] = []
        rows: list[list[int]] = []
        for chunk in first_of_id.values():
            # A chunk without a single word can't be found; in the index it would only shorten
            # the average length that BM25 measures the others against.
            if row := [vocabulary[term] for term in terms(chunk.text)]:
                self._chunks.append(chunk)
                rows.append(row)
        self._vocabulary: dict[str, int] = dict(vocabulary)
        self._index: Any = None
        if rows:
            self._index = _import_bm25s().BM25(backend="numpy", csc_backend="numpy")
            self._index.index(
                (rows, self._vocabulary), create_empty_token=False, show_progress=False
            )

    def search(self, question: str, top_k: int) -> list[Hit[ChunkT]]:
        """Return the chunks that share a word with the question, best first, `top_k` at most.

        Equal scores keep the order the chunks were given in. Nothing in common: an empty list.
        Raises UsageError for a `top_k` below 1.
        """
        if top_k < 1:
            raise UsageError(
                f"top-k is {top_k}: a search gives at least one chunk", "give --top-k 1 or more"
            )
        ids = [
            self._vocabulary[term] for term in question_terms(question) if term in self._vocabulary
        ]
        if not ids:
            return []
        # bm25s's own top-k breaks ties by memory order, so the best are picked here. Its idf is
        # positive for every term (Lucene's variant), so a score above 0 means a shared word.
        scores: list[float] = self._index.get_scores_from_ids(ids).tolist()
        found = [row for row, score in enumerate(scores) if score > 0]
        found.sort(key=lambda row: -scores[row])
        return [
            Hit(chunk=self._chunks[row], score=scores[row], rank=rank)
            for rank, row in enumerate(found[:top_k], start=1)
        ]


def question_terms(question: str) -> list[str]:
    """Return the terms to search for: each once, in order, without words that say nothing.

    A question made of nothing else ("Who are The Who?") keeps them all.
    """
    every = dict.fromkeys(terms(question))
    return [term for term in every if term not in _STOP_TERMS] or list(every)


def terms(text: str) -> list[str]:
    """Return the terms of a text, as often as they occur, in no promised order.

    Words are compared NFKC-normalised, case-folded and without English plural or possessive
    endings. Scripts that put no spaces between words (and Korean, whose particles stick to
    theirs) give every two neighbouring characters, and each ideograph also alone.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found: list[str] = []
    if not folded.isascii():
        folded = folded.replace("’", "'")
        runs = _UNSPACED.findall(folded)
        if runs:
            folded = _UNSPACED.sub(" ", folded)
            for run in runs:
                found += _character_terms(run)
    found += [_singular(word) for word in _words(_POSSESSIVE.sub("", folded))]
    return found


# Scripts written without spaces between words, as ranges of a regular expression's class.
_IDEOGRAPHS = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNSPACED = re.compile(
    f"[{_IDEOGRAPHS}"
    "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    "\u3105-\u312f\u31a0-\u31bf"  # bopomofo
    "\uac00-\ud7a3"  # Hangul syllables
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0eda"  # Thai, Lao
    "\u0f40-\u0fbc\u1000-\u103f\u1050-\u109d\u1780-\u17d3]+"  # Tibetan, Burmese, Khmer
)
_IDEOGRAPH = re.compile(f"[{_IDEOGRAPHS}]")
_POSSESSIVE = re.compile(r"(?<=[^\W_])'s\b")
_WORD = re.compile(r"[^\W_]+")


def _character_terms(run: str) -> Iterator[str]:
    if len(run) == 1:
        yield run
        return
    yield from (run[at : at + 2] for at in range(len(run) - 1))
    yield from _IDEOGRAPH.findall(run)


def _words(text: str) -> list[str]:
    """Runs of letters, digits and the marks that belong to them; `_` separates.

    Python's `\\w` leaves out combining marks, which would cut Hindi or Tamil words at every
    vowel sign, so the marks this text uses are added to the pattern.
    """
    if text.isascii():
        return _WORD.findall(text)
    marks = "".join(sorted(c for c in set(text) if unicodedata.category(c).startswith("M")))
    if not marks:
        return _WORD.findall(text)
    return re.findall(rf"[^\W_](?:[^\W_]|[{re.escape(marks)}])*", text)


def _singular(word: str) -> str:
    """Fold a plural's ending away: enough for "buoys" to find "buoy", rarely enough to mislead."""
    if len(word) < 4 or word[-1] != "s" or word[-2] in "su":
        return word
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    return word[:-1]


_STOP_TERMS = frozenset(
    terms("""
    a about an and any are as at be been but by can could did do does for from had has have how
    i if in into is it its may me must my of on or our shall should so than that the their them
    then there these they this those to us was we were what when where which who whom whose why
    will with would you your
    """)
)


def _import_bm25s() -> ModuleType:
    """Import bm25s (a fifth of a second) for the first index, quietly and with numpy alone.

    On import it also loads numba and runs a first operation in JAX where they are installed;
    JAX would take most of a GPU's memory for it, and neither is used here.
    """
    with _hidden("numba", "jax", "jax.lax"):
        import bm25s

    # It sets its own logger to DEBUG: whoever logs the root logger would get a line an index.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    module: ModuleType = bm25s
    return module


@contextmanager
def _hidden(*modules: str) -> Iterator[None]:
    """Make importing these modules fail inside the block, unless they are already loaded."""
    hidden = [name for name in modules if name not in sys.modules]
    # None in sys.modules is Python's documented way to say "not to be imported".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
