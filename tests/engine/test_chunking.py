"""Chunks cover the document exactly, keep to the limit, and cut where a reader would."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.errors import UsageError
from engine.chunking import Chunk, is_boundary
from engine.tokenizer import Tokenizer
from tests.engine.cut_texts import split_document
from tests.engine.tiny_tokenizers import CONTROL, CONTROL_LOOKING, write_tokenizer

KINDS = ("byte_level", "byte_level_nfkc", "sentencepiece", "metaspace", "unigram", "word_level")
CLUSTERS = ["👩‍👩‍👧", "🇩🇪", "e\u0301", "👍🏽", "กำ", "क्षि", "각", "\r\n", "x" + "\u0301" * 40]
PIECES = [
    *CLUSTERS,
    *CONTROL,
    *CONTROL_LOOKING,
    *["The watch writes. ", "Keys? At the gate!\n", "\n\n", "\n \n", "# Gate\n\n", "- item\n"],
    *["夜警は書く。「青い本。」", "夜班，读数", "ยามกลางคืน", "    indented\n", "a_b", "...", '."'],
    *[" " * 40, "\n" * 30, "\t", "\u3000", "a" * 50, "_" * 30, "\0", "\u200d", "\ufdfa", "\ufeff"],
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.sampled_from(PIECES),
        st.sampled_from(PIECES).map(lambda piece: piece * 7),
        st.text(max_size=6),
    ),
    max_size=25,
).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        kind: Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS
    }


@pytest.fixture(scope="module")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


def texts(chunks: list[Chunk]) -> list[str]:
    return [chunk.text for chunk in chunks]


def paragraphs(count: int) -> str:
    return "\n\n".join(
        f"Paragraph {i} of the night watch. The boiler reads {i * 7} bar. Sign the blue book."
        for i in range(count)
    )


# --- what always holds ----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(KINDS), st.integers(16, 40))
def test_chunks_cover_the_text_and_keep_to_the_limit(
    tokenizers: dict[str, Tokenizer], text: str, kind: str, limit: int
) -> None:
    tokenizer = tokenizers[kind]
    chunks = split_document(text, tokenizer, limit)
    if chunks:
        assert "".join(texts(chunks)) == text
    else:
        assert not text.strip() or not tokenizer.encode(text)
    done = 0
    for chunk in chunks:
        assert (chunk.start, chunk.end) == (done, done + len(chunk.text))
        assert list(chunk.token_ids) == tokenizer.encode(chunk.text)
        assert chunk.token_ids
        assert len(chunk.token_ids) <= limit or len(chunk.text) == 1
        assert tokenizer.special_ids.isdisjoint(chunk.token_ids)
        done = chunk.end
    assert split_document(text, tokenizer, limit) == chunks


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from(KINDS), st.integers(16, 40), st.integers(1, 39))
def test_overlapping_chunks_repeat_no_more_than_asked(
    tokenizers: dict[str, Tokenizer], text: str, kind: str, limit: int, overlap: int
) -> None:
    tokenizer = tokenizers[kind]
    overlap = min(overlap, limit - 1)
    chunks = split_document(text, tokenizer, limit, overlap)
    covered = ""
    for chunk in chunks:
        assert chunk.text == text[chunk.start : chunk.end]
        assert list(chunk.token_ids) == tokenizer.encode(chunk.text)
        assert len(chunk.token_ids) <= limit or len(chunk.text) == 1
        covered += text[len(covered) : chunk.end]
    assert covered == text or not chunks
    for before, after in pairwise(chunks):
        assert before.start < after.start <= before.end < after.end
        assert len(tokenizer.encode(text[after.start : before.end])) <= overlap


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from(KINDS), st.integers(16, 40), st.integers(0, 15))
def test_no_cut_inside_what_a_reader_sees_as_one_character(
    tokenizers: dict[str, Tokenizer], text: str, kind: str, limit: int, overlap: int
) -> None:
    places = [0, *(i for i in range(1, len(text)) if is_boundary(text, i)), len(text)]
    for chunk in split_document(text, tokenizers[kind], limit, overlap):
        for start, end in pairwise(places):
            if start < chunk.end < end:  # allowed where the character does not fit a chunk
                assert len(tokenizers[kind].encode(text[start:end])) > limit - overlap - 4


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from(["byte_level", "sentencepiece"]), st.integers(16, 40))
def test_no_chunk_is_blank_where_that_can_be_helped(
    tokenizers: dict[str, Tokenizer], text: str, kind: str, limit: int
) -> None:
    """A blank run and the characters beside it, with their own runs, must not fit one chunk."""
    regex = pytest.importorskip("regex")
    for chunk in split_document(text, tokenizers[kind], limit):
        if not chunk.text.strip():
            before, after = text[: chunk.start].rstrip(), text[chunk.end :].lstrip()
            last, first = regex.findall(r"\X", before)[-1:], regex.findall(r"\X", after)[:1]
            start = len(before.removesuffix("".join(last)).rstrip())
            end = len(text) - len(after.removeprefix("".join(first)).lstrip())
            assert len(tokenizers[kind].encode(text[start:end])) > limit - 5


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from("".join(CLUSTERS)), st.characters(codec="utf-8")), max_size=6
    ).map("".join)
)
def test_boundaries_agree_with_unicode(text: str) -> None:
    regex = pytest.importorskip("regex")
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    cuts = {place for place in range(1, len(text)) if is_boundary(text, place)}
    assert cuts <= ends


# --- where the cuts fall --------------------------------------------------------------------


def test_cuts_fall_between_paragraphs(tokenizer: Tokenizer) -> None:
    text = paragraphs(20)
    for chunk in split_document(text, tokenizer, 128)[:-1]:
        assert chunk.text.endswith("\n\n")
        assert len(chunk.token_ids) > 64


def test_then_between_sentences(tokenizer: Tokenizer) -> None:
    text = " ".join(f'He wrote "reading {i} is 3.5 bar!" The boiler hums.' for i in range(40))
    chunks = split_document(text, tokenizer, 96)
    assert len(chunks) > 4
    assert all(chunk.text.endswith(("hums. ", 'bar!" ')) for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_unspaced_sentences_are_cut_after_their_mark(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    text = "夜警は毎晩値を書く。本は青い！「どこ？」夜班写进本子里。" * 30
    chunks = split_document(text, tokenizers[kind], 128)
    assert len(chunks) > 10
    for chunk in chunks[:-1]:
        assert chunk.text.endswith(("。", "！", "」"))


UNMARKED = {
    "thai": "ยามกลางคืนเขียนค่าของหม้อไอน้ำ" * 50,
    "chinese": "夜班每晚读数" * 200,
    "letters": "ab" * 2000,
}


@pytest.mark.parametrize("name", UNMARKED)
def test_text_without_any_mark_still_comes_in_chunks(tokenizer: Tokenizer, name: str) -> None:
    chunks = split_document(UNMARKED[name], tokenizer, 64)
    assert "".join(texts(chunks)) == UNMARKED[name]
    assert all(len(chunk.token_ids) > 32 for chunk in chunks[:-1])


def test_then_between_lines_then_words(tokenizer: Tokenizer) -> None:
    code = "".join(f"    value_{i} = boiler.pressure(reading_{i})\n" for i in range(60))
    assert all(chunk.text.endswith("\n") for chunk in split_document(code, tokenizer, 96))
    words = " ".join(["watch", "boiler", "readings"] * 200)
    assert all(chunk.text.endswith(" ") for chunk in split_document(words, tokenizer, 64)[:-1])


def test_a_heading_stays_with_what_follows(tokenizer: Tokenizer) -> None:
    text = "\n\n".join(f"## Part {i}\n\n{paragraphs(1)}" for i in range(30))
    chunks = split_document(text, tokenizer, 100)
    assert len(chunks) > 5
    assert all(chunk.text.startswith("## Part") for chunk in chunks)


def test_the_end_is_no_scrap(tokenizer: Tokenizer) -> None:
    words = "watch " * 400
    one = len(tokenizer.encode(words))
    for extra in range(1, 12):
        sizes = [
            len(chunk.token_ids)
            for chunk in split_document(words + "boiler " * extra, tokenizer, one)
        ]
        assert min(sizes) > one // 3, (extra, sizes)


def test_blank_runs_go_with_their_neighbour(tokenizer: Tokenizer) -> None:
    text = "\n\n\n" + paragraphs(8) + "\n \n\n"
    for limit in range(16, 120):
        for chunk in split_document(text, tokenizer, limit):
            assert chunk.text.strip()


def test_a_change_at_the_end_leaves_earlier_chunks_alone(tokenizer: Tokenizer) -> None:
    text = paragraphs(60)
    before = texts(split_document(text, tokenizer, 128))
    for ending in [
        "",
        "\n\nOne more.",
        " And a very long addition, " * 100,
        "\n\n夜警は書く。" * 50,
    ]:
        after = texts(split_document(text[:-10] + ending, tokenizer, 128))
        assert after[: len(before) - 2] == before[:-2]


def test_a_change_at_the_start_dies_out(tokenizer: Tokenizer) -> None:
    text = paragraphs(80)
    before = set(texts(split_document(text, tokenizer, 128)))
    after = set(texts(split_document("Notice. " + text, tokenizer, 128)))
    assert len(before & after) >= 0.5 * len(before)


def test_overlap_begins_at_a_sentence(tokenizer: Tokenizer) -> None:
    text = paragraphs(30)
    chunks = split_document(text, tokenizer, 128, 48)
    for before, after in pairwise(chunks):
        assert after.start < before.end
        assert after.text.startswith(("Paragraph", "The boiler", "Sign"))


def test_the_same_text_has_the_same_name_for_every_tokenizer(
    tokenizers: dict[str, Tokenizer],
) -> None:
    one, other = (split_document("The gate.", tokenizers[k]) for k in ("byte_level", "unigram"))
    assert one[0].chunk_id == other[0].chunk_id
    assert len(one[0].chunk_id) == 64


# --- odd text and bad arguments -------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\n\t", " " * 100_000, "\u3000\u2028"])
def test_blank_text_has_no_chunks(tokenizer: Tokenizer, text: str) -> None:
    assert split_document(text, tokenizer) == []


def test_text_the_tokenizer_cannot_spell_has_no_chunks(tokenizers: dict[str, Tokenizer]) -> None:
    assert split_document("cat dog " * 1000, tokenizers["word_level"]) == []
    chunks = split_document("cat " * 500 + "the watch" + " dog" * 500, tokenizers["word_level"], 16)
    assert [len(chunk.token_ids) for chunk in chunks] == [2]


def test_a_character_larger_than_a_chunk_is_cut_between_code_points(tokenizer: Tokenizer) -> None:
    text = "a" + "\u0301" * 200
    chunks = split_document(text, tokenizer, 16)
    assert "".join(texts(chunks)) == text
    assert all(len(chunk.token_ids) <= 16 for chunk in chunks)


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    (chunk,) = split_document("the \ud800 watch", tokenizer)
    assert chunk.text == "the \ufffd watch"


def test_limits_that_cannot_be(tokenizer: Tokenizer) -> None:
    for limit, overlap in [(15, 0), (0, 0), (-1, 0), (16, 16), (16, 17), (16, -1)]:
        with pytest.raises(UsageError):
            split_document("text", tokenizer, limit, overlap)


LONG = {
    "letters": "a" * 100_000,
    "underscores": "_" * 50_000,
    "spaces": " " * 50_000 + "x" + " " * 50_000,
    "dots": "." * 100_000,
    "quoted dots": '."' * 50_000,
    "newlines": "x" + "\n" * 100_000 + "y",
    "accents": "x" + "\u0301" * 50_000,
    "flags": "🇩🇪" * 25_000,
    "viramas": "क्" * 25_000,
    "headings": "# " * 50_000,
    "blank lines": ("\n" + " " * 500) * 200 + "x",
    "chinese": "夜班每晚读数" * 10_000,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("overlap", [0, 32])
def test_one_huge_line_is_quick(tokenizers: dict[str, Tokenizer], name: str, overlap: int) -> None:
    for kind in ("byte_level", "sentencepiece"):
        start = time.process_time()
        chunks = split_document(LONG[name], tokenizers[kind], 512, overlap)
        assert time.process_time() - start < 2, kind
        assert chunks[-1].end == len(LONG[name])


@pytest.mark.model
def test_default_model_chunks_real_documents(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    folder = Path(__file__).parents[2] / "examples" / "docs"
    documents = [path.read_text() for path in sorted(folder.iterdir()) if path.is_file()]
    assert documents
    for text in documents:
        for limit in (64, 512):
            chunks = split_document(text, tokenizer, limit)
            assert "".join(texts(chunks)) == text
            assert all(len(chunk.token_ids) <= limit for chunk in chunks)


@pytest.mark.model
def test_default_model_chunks_megabytes_in_seconds(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    text = paragraphs(12_000)  # about 1 MB
    start = time.process_time()
    split_document(text, tokenizer)
    assert time.process_time() - start < 5
