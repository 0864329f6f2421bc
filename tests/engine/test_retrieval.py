"""Retrieval: what counts as a word, which chunks are found and in which order."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.catalog import Catalog, ChunkText
from cache_store.errors import NotFoundError, UsageError
from cache_store.keys import chunk_id
from engine.retrieval import BM25Retriever, CatalogChunks, Hit, bm25, keeping
from engine.retrieval.keeping import kept_folder
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
        ("cafe", "das Café"),
        ("ZURICH", "in Zürich"),
        ("Lodz", "Łódź"),
        ("ΑΘΗΝΑ", "η Αθήνα"),
        ("ΣΊΣΥΦΟΣ", "ο Σίσυφος"),
        ("елка", "Ёлка"),
        ("שלום", "שָׁלוֹם"),
        ("email", "an e-mail"),
        ("TB40", "type TB-40"),
        ("getUserName", "get_user_name()"),
        ("user", "getUserName()"),
        ("1000000", "1,000,000 of them"),
        ("l'eau", "de l’eau"),
    ],
)
def test_what_is_written_differently_is_found(question: str, text: str) -> None:
    hits = BM25Retriever(notes("zzz 0000", text)).search(question, 1)
    assert found(hits) == [text]


def test_unspaced_text_is_ranked_by_neighbouring_characters() -> None:
    retriever = BM25Retriever(notes("京東は会社です", "東京は都市です", "北の京、南の東"))
    assert found(retriever.search("東京", 3))[0] == "東京は都市です"


def test_scripts_side_by_side_are_told_apart() -> None:
    assert " ".join(sorted(terms("第3章 TB-40号機"))) == "3 40 tb tb40 号 号機 機 章 第"


@pytest.mark.parametrize(
    ("question", "first", "second"),
    [
        ("What does C++ cost?", "C++ costs", "C costs"),
        ("Is it in C#?", "in C# it is", "in C it is"),
        ("version v2.1", "since v2.1", "since v2.7, 1"),
        ("192.168.0.1", "at 192.168.0.1", "at 168.192.1.0"),
        ("foo_bar", "the foo_bar", "the bar or foo"),
        ("Was ist die Miete?", "die Miete", "was die da ist, ist die"),
        ("Où est le port ?", "un port", "où est-il, où est-elle, et le"),
        ("Где порт?", "порт", "где, где и где"),
    ],
)
def test_what_says_more_comes_first(question: str, first: str, second: str) -> None:
    assert found(BM25Retriever(notes(second, first)).search(question, 2))[0] == first


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


def test_bm25s_is_imported_for_the_first_index_only_and_with_numpy_alone(tmp_path: Path) -> None:
    # All stand ready to be imported and say so; bm25s would otherwise load any on sight.
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax loaded')")
    (tmp_path / "jax/lax.py").write_text("def top_k(*_): print('jax used')")
    (tmp_path / "numba.py").write_text("print('numba loaded')\ndef njit(f): return f")
    (tmp_path / "tqdm.py").write_text("print('tqdm loaded')")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})  # before those that are installed
from engine.retrieval import BM25Retriever
print("bm25s" in sys.modules)
class Chunk:
    chunk_id, text = "a", "rope"
print(len(BM25Retriever([Chunk()]).search("rope", 6)), "bm25s" in sys.modules)
import jax.lax, numba, tqdm
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    loaded = ["jax loaded", "numba loaded", "tqdm loaded"]
    assert printed.splitlines() == ["False", "1 True", *loaded]


# The index that is kept.


class Kept:
    """A catalog and the folder its index is kept in."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keeping, "KEPT_FROM", 0)
        self.root, self.folder = root, root / "kept"
        self.catalog = Catalog(root / "catalog.db", read_only=False)
        self.read: list[str] = []
        given = CatalogChunks.texts

        def texts(corpus: CatalogChunks, ids: Sequence[str]) -> Iterator[str]:
            self.read += ids
            return given(corpus, ids)

        monkeypatch.setattr(CatalogChunks, "texts", texts)

    @property
    def file(self) -> Path:
        return self.folder / bm25.FILE

    def add(self, source: str, *texts: str) -> None:
        chunks = [ChunkText(chunk_id(text), text, 0, len(text), 1) for text in texts]
        self.catalog.replace_document(source, "", "{}", chunks)

    def texts_read(self, question: str = "rope tar tide") -> int:
        """How many texts a search reads, which finds what an index made anew finds."""
        self.read.clear()
        hits = BM25Retriever(CatalogChunks(self.catalog, self.folder)).search(question, 9)
        read = len(self.read)
        assert hits == BM25Retriever(self.catalog.chunks()).search(question, 9)
        return read


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = Kept(tmp_path, monkeypatch)
    made.add("one", "a rope", "tar and rope", "no word of it")
    made.add("two", "the tide, the tide", "a rope")
    return made


def test_a_kept_index_is_read_and_not_made_again(kept: Kept) -> None:
    assert kept.texts_read() == 4
    assert kept.file.stat().st_mode & 0o777 == 0o600
    assert kept.texts_read() == 0


def test_an_index_is_made_again_when_the_chunks_have_changed(kept: Kept) -> None:
    kept.texts_read()
    kept.add("three", "tar", "tar tar rope", "a rope", "?!")
    assert kept.texts_read() == 7
    kept.catalog.collect("sea", ["three"])  # other chunks are not there for that
    assert kept.texts_read() == 0
    kept.add("one", "tar and rope", "no word of it")  # "a rope" is the second document's now
    kept.catalog.remove_document("three")
    assert kept.texts_read() == 4
    kept.catalog.remove_document("one")
    kept.catalog.remove_document("two")
    assert kept.texts_read() == 0
    kept.add("two", "a rope")
    assert kept.texts_read() == 1


def test_what_changes_while_it_is_read_is_not_kept_as_if_it_had_not(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = CatalogChunks.ids

    def ids(corpus: CatalogChunks) -> list[str]:
        found = given(corpus)
        kept.catalog.remove_document("two")
        return found

    with monkeypatch.context() as during:
        during.setattr(CatalogChunks, "ids", ids)
        BM25Retriever(CatalogChunks(kept.catalog, kept.folder))
    kept.add("two", "the tide, the tide", "a rope")
    assert kept.texts_read() == 4


def test_documents_in_another_order_are_noticed(kept: Kept) -> None:
    kept.add("one", "an oar", "ropes")
    kept.add("two", "ropes, now")
    kept.texts_read("rope")
    kept.catalog.remove_document("one")
    kept.add("one", "an oar", "ropes")
    assert kept.texts_read("rope") == 3


def test_another_store_at_the_same_place_is_noticed(kept: Kept) -> None:
    kept.texts_read()
    revision = kept.catalog.revision
    kept.catalog.close()
    kept.catalog.path.unlink()
    kept.catalog = Catalog(kept.catalog.path, read_only=False)
    while kept.catalog.revision < revision:
        kept.add("one", "a tide table", "tar")
    assert kept.texts_read() == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "header", "version"])
def test_a_damaged_index_is_made_again(
    kept: Kept, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.texts_read()
    data = bytearray(kept.file.read_bytes())
    if damage == "version":
        monkeypatch.setattr(bm25, "TERMS_VERSION", -1)
    elif damage == "cut":
        kept.file.write_bytes(data[: len(data) // 2])
    elif damage == "foreign":
        kept.file.write_bytes(b"hello")
    else:
        at = data.index(b"facts") if damage == "header" else len(data) - 64
        data[at] ^= 2
        kept.file.write_bytes(data)
    assert kept.texts_read() == 4
    assert kept.texts_read() == 0


def test_where_nothing_can_be_kept_everything_is_found(kept: Kept) -> None:
    kept.folder.write_text("a file")
    assert kept.texts_read() == 4
    assert kept.texts_read() == 4


def test_a_full_disk_is_no_error_and_leaves_nothing_half(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "replace", full)
    assert kept.texts_read() == 4
    assert list(kept.folder.iterdir()) == []


def test_a_folder_that_may_not_be_looked_into_is_no_error(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "refused", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    kept_folder(kept.folder, kept.root)


def test_what_a_killed_process_left_is_removed(kept: Kept) -> None:
    kept.folder.mkdir()
    old, new = (kept.folder / f".{bm25.FILE}.{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    kept.texts_read()
    assert set(kept.folder.iterdir()) == {new, kept.file}


def test_folders_of_stores_that_are_gone_go_with_the_next_new_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = kept_folder(tmp_path / "search", tmp_path / "a")
    assert kept_folder(tmp_path / "search", tmp_path / "a") == first
    (tmp_path / "a").rmdir()
    second = kept_folder(tmp_path / "search", tmp_path / "b")
    assert list((tmp_path / "search").iterdir()) == [second]


def test_only_chunks_of_the_collections_are_found(kept: Kept) -> None:
    kept.catalog.collect("sea", ["two"])
    corpus = CatalogChunks(kept.catalog, kept.folder, ["sea"])
    hits = BM25Retriever(corpus).search("rope tar tide", 9)
    assert {(hit.chunk.source, hit.chunk.text) for hit in hits} == {
        ("two", "the tide, the tide"),
        ("two", "a rope"),
    }
    with pytest.raises(NotFoundError, match="land"):
        CatalogChunks(kept.catalog, kept.folder, ["land"])
