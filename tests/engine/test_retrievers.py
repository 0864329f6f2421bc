"""Retrievers beside BM25: by meaning, by several at once, and the user's own."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_store.catalog import Catalog, ChunkText
from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from engine.retrieval import (
    BM25Retriever,
    CatalogChunks,
    EmbedRetriever,
    Hit,
    HybridRetriever,
    OwnRetriever,
    StaticEmbedder,
    keeping,
)
from engine.retrieval.embed import find_model
from engine.retrieval.own import load_own
from tests.engine.static_model import write_static_model


@dataclass(frozen=True)
class Note:
    chunk_id: str
    text: str


def notes(*texts: str) -> list[Note]:
    return [Note(text, text) for text in texts]


def found(hits: Sequence[Hit[Note]]) -> list[str]:
    return [hit.chunk.text for hit in hits]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> StaticEmbedder:
    pytest.importorskip("model2vec")
    return StaticEmbedder(write_static_model(tmp_path_factory.mktemp("static")))


def test_what_means_the_same_is_found_by_another_word(embedder: StaticEmbedder) -> None:
    chunks = notes("the sea", "a cord", "a light", "?!", "")
    hits = EmbedRetriever(chunks, embedder).search("rope", 3)
    assert hits[0].chunk.text == "a cord"
    assert 0.9 < hits[0].score <= 1
    assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
    assert all(hit.score > 0 for hit in hits)
    assert "a light" not in found(hits)  # at a right angle
    assert BM25Retriever(chunks).search("rope", 3) == []


def test_a_question_that_says_nothing_finds_nothing(embedder: StaticEmbedder) -> None:
    assert EmbedRetriever(notes("a cord"), embedder).search("zeppelin", 3) == []
    assert EmbedRetriever(notes(), embedder).search("rope", 3) == []
    assert EmbedRetriever(notes("a cord"), embedder).search("\ud800 rope", 3) != []


def test_a_vector_is_made_once_and_dropped_with_its_model(
    tmp_path: Path, embedder: StaticEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "KEPT_FROM", 0)
    catalog = Catalog(tmp_path / "catalog.db", read_only=False)
    embedded: list[int] = []

    def add(source: str, *texts: str) -> None:
        cut = [ChunkText(chunk_id(text), text, 0, len(text), 1) for text in texts]
        catalog.replace_document(source, "", "{}", cut)

    def search(by: StaticEmbedder) -> list[tuple[str, float]]:
        embedded.clear()
        corpus = CatalogChunks(
            catalog, tmp_path / "kept", on_read=lambda done, total: embedded.append(total)
        )
        hits = EmbedRetriever(corpus, by).search("rope light", 9)
        fresh = EmbedRetriever(catalog.chunks(), by).search("rope light", 9)
        assert [(h.chunk, h.rank) for h in hits] == [(h.chunk, h.rank) for h in fresh]
        assert np.allclose([h.score for h in hits], [h.score for h in fresh])
        return [(hit.chunk.text, hit.score) for hit in hits]

    add("one", "a cord", "the sea", "a lamp")
    first = search(embedder)
    assert embedded == [3]
    assert search(embedder) == first
    assert embedded == []
    add("two", "a rope")
    add("one", "a lamp", "a cord")
    search(embedder)
    assert embedded == [1]
    other = StaticEmbedder(write_static_model(tmp_path / "other", turned=7))
    assert other.fingerprint != embedder.fingerprint
    search(other)
    assert embedded == [3]
    search(embedder)  # both are kept
    assert embedded == []


def test_a_folder_that_holds_no_model_is_said(tmp_path: Path, embedder: StaticEmbedder) -> None:
    with pytest.raises(CacheblendError, match="not an embedding model"):
        StaticEmbedder(tmp_path)
    with pytest.raises(NotFoundError, match="no embedding model at"):
        find_model(str(tmp_path / "nowhere"), offline=False)
    with pytest.raises(NotFoundError, match="this is offline") as caught:
        find_model("minishlab/no-such-model", offline=True)
    assert "--embed-model FOLDER" in caught.value.hint
    assert find_model(str(tmp_path), offline=True) == tmp_path


class Fixed:
    """Finds these, always."""

    def __init__(self, *texts: str) -> None:
        self._chunks = notes(*texts)

    def search(self, question: str, top_k: int) -> list[Hit[Note]]:
        return [Hit(c, 9 - n, n + 1) for n, c in enumerate(self._chunks)][:top_k]


def test_fusion_ranks_by_the_sum_of_reciprocal_ranks() -> None:
    hits = HybridRetriever(Fixed("a", "b", "c"), Fixed("c", "b", "d")).search("", 9)
    assert found(hits) == ["c", "b", "a", "d"]
    best = 61 / 2
    assert hits[0].score == pytest.approx(best * (1 / 63 + 1 / 61))
    assert hits[1].score == pytest.approx(best * (2 / 62))
    assert [hit.rank for hit in hits] == [1, 2, 3, 4]
    both = HybridRetriever(Fixed("a", "b"), Fixed("a"))
    assert [(h.chunk.text, h.score) for h in both.search("", 1)] == [("a", 1)]
    assert HybridRetriever(Fixed(), Fixed()).search("", 3) == []
    with pytest.raises(UsageError, match="top-k"):
        both.search("", 0)


def test_hybrid_finds_words_and_meanings(embedder: StaticEmbedder) -> None:
    chunks = notes("a light", "the zeppelin", "nothing")
    retriever = HybridRetriever(BM25Retriever(chunks), EmbedRetriever(chunks, embedder))
    assert set(found(retriever.search("zeppelin lamp", 3))) == {"a light", "the zeppelin"}


# The user's own.


def own(give: Any, *texts: str, top_k: int = 3) -> list[Hit[Note]]:
    def find(question: str, chunks: list[Note], top_k: int) -> Any:
        sys.stdout.write("hello\n")
        return give(chunks) if callable(give) else give

    return OwnRetriever("mine:find", find, notes(*(texts or "abc"))).search("?", top_k)


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (["b", "a"], [("b", 1), ("a", 0.5)]),
        (lambda chunks: [chunks[2]], [("c", 1)]),
        ([("b", 0.25), ["a", -3]], [("b", 0.25), ("a", -3)]),
        (lambda chunks: [(chunks[1], np.float32(2))], [("b", 2)]),
        (lambda chunks: [Hit(chunks[0], 7, 5)], [("a", 7)]),
        (["a", "a", "c", "b"], [("a", 1), ("c", 1 / 3), ("b", 0.25)]),
        (lambda chunks: (c for c in chunks), [("a", 1), ("b", 0.5), ("c", 1 / 3)]),
        ([], []),
    ],
)
def test_hits_may_be_given_in_several_forms(
    give: Any, expected: list[tuple[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    hits = own(give)
    assert [(hit.chunk.text, hit.score) for hit in hits] == expected
    assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
    assert capsys.readouterr() == ("", "hello\n")  # stdout is for data


def test_no_more_than_top_k() -> None:
    assert len(own(["a", "b", "c"], top_k=2)) == 2


@pytest.mark.parametrize(
    ("give", "said"),
    [
        (["zeppelin"], "'zeppelin', which is no chunk"),
        ([None], "None, which is no chunk"),
        ([("a", "much")], "the score 'much'"),
        ([("a", float("nan"))], "the score nan"),
        ([("a", 10**400)], "the score 1000"),
        (None, "failed: TypeError"),
        (lambda chunks: 1 / 0, "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_what_it_does_wrong_is_said_in_one_line(give: Any, said: str) -> None:
    with pytest.raises(CacheblendError, match=said) as caught:
        own(give)
    assert caught.value.message.startswith("retriever mine:find")
    assert "\n" not in caught.value.message


def test_a_class_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "my_index.py").write_text(
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Index:\n"
        "    chunks: list\n"
        "    made: int = 0\n"
        "    def search(self, question, top_k):\n"
        "        self.made += 1\n"
        "        return [(self.chunks[0], self.made)]\n"
        "def find(question, chunks, top_k): return []\n"
        "number = 3\n"
    )
    for name in ("my_index:Index", f"{tmp_path}/my_index.py:Index"):
        retriever = OwnRetriever(name, load_own(name, [tmp_path]), notes("a"))
        assert [retriever.search("", 1)[0].score for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such:find", "there is no module no_such"),
        ("no_such.py:find", "there is no file no_such.py"),
        ("good:number", "has no function or class number"),
        ("good:fined", "has no function or class fined"),
        ("bad:find", "importing bad failed: SyntaxError"),
        ("leaves:find", "importing leaves failed: SystemExit: 3"),
        ("needs:find", "importing needs failed: ModuleNotFoundError: No module named 'no_such'"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "good.py").write_text("number = 3\ndef find(): ...\n")
    (tmp_path / "bad.py").write_text("def find(:\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "needs.py").write_text("import no_such\n")
    with pytest.raises(UsageError) as caught:
        load_own(name, [tmp_path])
    assert said in caught.value.message
    if name.endswith("fined"):
        assert caught.value.hint == "did you mean find?"
