"""Retrieval: what counts as a word, which chunks are found and in which order."""

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import UsageError
from engine.retrieval import BM25Retriever, Hit
from engine.retrieval.terms import question_terms, terms


@dataclass(frozen=True)
class Note:
    chunk_id: str
    text: str


def notes(*texts: str) -> list[Note]:
    return [Note(chunk_id=f"{number:064x}", text=text) for number, text in enumerate(texts)]


def found(hits: list[Hit[Note]]) -> list[str]:
    return [hit.chunk.text for hit in hits]


def test_the_chunk_with_the_rarer_word_comes_first() -> None:
    retriever = BM25Retriever(
        notes(
            "The harbour is open every day of the week.",
            "The harbour lamp is lit by hand.",
            "The harbour wall was raised in spring.",
        )
    )
    hits = retriever.search("Who lights the lamp in the harbour?", 2)
    assert hits[0].chunk.text == "The harbour lamp is lit by hand."
    assert [hit.rank for hit in hits] == [1, 2]
    assert hits[0].score > hits[1].score > 0


def test_chunks_without_a_common_word_are_left_out() -> None:
    retriever = BM25Retriever(notes("Boats and ropes.", "Cakes and tea."))
    assert found(retriever.search("Where are the ropes?", 6)) == ["Boats and ropes."]
    assert retriever.search("zeppelin", 6) == []


def test_a_word_that_every_chunk_has_still_counts() -> None:
    assert len(BM25Retriever(notes("tide", "tide", "tide")).search("tide", 6)) == 3


@pytest.mark.parametrize("question", ["", "   \n\t", "?!… — ***", "\x00", "___"])
def test_a_question_without_words_finds_nothing(question: str) -> None:
    assert BM25Retriever(notes("Boats and ropes.")).search(question, 6) == []


@pytest.mark.parametrize("texts", [[], [""], [" \n", "— … —"]])
def test_nothing_to_search_is_no_error(texts: list[str]) -> None:
    assert BM25Retriever(notes(*texts)).search("ropes", 6) == []


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_below_one_is_refused_even_with_nothing_to_search(top_k: int) -> None:
    for retriever in (BM25Retriever(notes()), BM25Retriever(notes("ropes"))):
        with pytest.raises(UsageError, match=f"top-k is {top_k}"):
            retriever.search("ropes", top_k)


def test_equal_scores_keep_the_order_given() -> None:
    texts = [f"{name} rope" for name in ("ash", "beech", "cedar", "elm", "fir", "gorse", "hazel")]
    assert found(BM25Retriever(notes(*texts)).search("rope", 4)) == texts[:4]
    assert found(BM25Retriever(notes(*reversed(texts))).search("rope", 4)) == texts[:2:-1]


def test_a_text_in_two_documents_is_found_once_as_the_first() -> None:
    @dataclass(frozen=True)
    class Placed(Note):
        source: str

    same = [
        Placed("aa", "rope", "one.md"),
        Placed("bb", "tar", "one.md"),
        Placed("aa", "rope", "b"),
    ]
    hits = BM25Retriever(same).search("rope", 6)
    assert [(hit.chunk.source, hit.rank) for hit in hits] == [("one.md", 1)]


def test_an_empty_chunk_changes_no_score() -> None:
    texts = ["rope and tar", "a rope that is longer than the other one was", "tar"]
    without = BM25Retriever(notes(*texts)).search("rope tar", 6)
    between = BM25Retriever(notes("", *texts, " \n ")).search("rope tar", 6)
    assert found(without) == found(between)
    assert [hit.score for hit in without] == [hit.score for hit in between]


def test_asking_with_a_word_twice_changes_nothing() -> None:
    retriever = BM25Retriever(notes("rope", "tar tar rope", "tar"))
    assert retriever.search("rope, rope, ROPES and tar", 6) == retriever.search("rope tar", 6)


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("BUOYS", "one buoy"),
        ("the company's batteries", "a battery"),
        ("the engineer’s report", "an engineer"),
        ("STRASSE", "straße"),
        ("ﬁne", "fine"),  # a ligature
        ("cafe\u0301", "café"),  # decomposed and composed
        ("ＴＢ４０", "TB40"),  # full width
        ("ИЗМЕРЕНИЕ", "измерение"),
        ("max_tide_height", "the tide"),
        ("工場", "東京の工場です"),
        ("潮", "潮流発電"),
        ("テスト", "これはテストです"),
        ("ค่าเช่า", "ผู้เช่าจ่ายค่าเช่าทุกเดือน"),
        ("학교", "학교에서 배운다"),
        ("हिन्दी", "वह हिन्दी बोलती है"),
    ],
)
def test_what_is_written_differently_is_found(question: str, text: str) -> None:
    hits = BM25Retriever(notes("zzz 0000", text)).search(question, 1)
    assert found(hits) == [text]


def test_unspaced_text_is_ranked_by_neighbouring_characters() -> None:
    retriever = BM25Retriever(notes("京東は会社です", "東京は都市です", "北の京、南の東"))
    assert found(retriever.search("東京", 3))[0] == "東京は都市です"


def test_scripts_side_by_side_are_told_apart() -> None:
    assert " ".join(sorted(terms("第3章 TB-40号機"))) == "3 40 tb 号 号機 機 章 第"


def test_vowel_signs_do_not_cut_a_word() -> None:
    assert terms("हिन्दी, தமிழ்") == ["हिन्दी", "தமிழ்"]


def test_possessives_and_plurals_fold_and_look_alikes_do_not() -> None:
    assert terms("buoys ferries dies buoy's glass status bus gas") == (
        ["buoy", "ferry", "die", "buoy", "glass", "status", "bus", "gas"]
    )


def test_a_question_drops_words_that_say_nothing_unless_it_has_no_others() -> None:
    assert question_terms("What is the height of the tide, and the tide's name?") == (
        ["height", "tide", "name"]
    )
    assert question_terms("Who are they?") == ["who", "are", "they"]


def test_a_very_long_word_takes_no_time() -> None:
    text = "a" * 100_000 + "_" * 50_000 + "'s" * 50_000 + "潮" * 50_000
    retriever = BM25Retriever(notes(text, "rope"))
    assert found(retriever.search("rope", 6)) == ["rope"]


@given(st.lists(st.text(max_size=40), max_size=8), st.text(max_size=20), st.integers(1, 10))
def test_any_text_is_searched_without_error_and_the_same_way_twice(
    texts: list[str], question: str, top_k: int
) -> None:
    chunks = notes(*texts)
    hits = BM25Retriever(chunks).search(question, top_k)
    assert hits == BM25Retriever(chunks).search(question, top_k)
    assert len(hits) <= top_k
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    asked = set(question_terms(question))
    sharing = [chunk for chunk in chunks if asked & set(terms(chunk.text))]
    assert all(hit.chunk in sharing for hit in hits)
    assert len(hits) == min(top_k, len(sharing))


@given(st.text())
def test_a_chunk_is_found_by_its_own_text(text: str) -> None:
    hits = BM25Retriever(notes(text)).search(text, 1)
    assert bool(hits) == bool(terms(text))


def test_searching_prints_and_logs_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        BM25Retriever(notes("rope", "tar")).search("rope", 6)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_bm25s_is_imported_for_the_first_index_only_and_without_numba_or_jax(
    tmp_path: Path,
) -> None:
    # Both stand ready to be imported and say so; bm25s would otherwise load either on sight.
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax loaded')")
    (tmp_path / "jax/lax.py").write_text("def top_k(*_): print('jax used')")
    (tmp_path / "numba.py").write_text("print('numba loaded')\ndef njit(f): return f")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})  # before those that are installed
from engine.retrieval import BM25Retriever
print("bm25s" in sys.modules)
class Chunk:
    chunk_id, text = "a", "rope"
print(len(BM25Retriever([Chunk()]).search("rope", 6)), "bm25s" in sys.modules)
import jax.lax, numba
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == ["False", "1 True", "jax loaded", "numba loaded"]
