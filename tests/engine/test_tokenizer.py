"""Plain text never becomes control ids, and streamed text is whole characters."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.errors import IntegrityError, NotFoundError
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import (
    CONTROL,
    CONTROL_LOOKING,
    KINDS,
    PLAIN_ADDED,
    write_tokenizer,
)

MARKERS = [
    *CONTROL,
    *CONTROL_LOOKING,
    *["<s>", "</s>", "<unk>", "<|strip|>", "<|norm|>", "<|loose|>", "<0x0A>"],
]
FULL_WIDTH = [
    "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in marker)
    for marker in MARKERS
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        kind: Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS
    }


def library(model_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def spelt(tokenizer: Tokenizer, text: str) -> bool:
    """Whether ids for `text` hold no control token, in every way of asking."""
    ids = tokenizer.encode(text)
    offsets = tokenizer.encode_with_offsets(text)
    return tokenizer.special_ids.isdisjoint(ids) and [token for token, _, _ in offsets] == ids


# --- control text ---------------------------------------------------------------------------


def test_the_markers_are_control_tokens_of_these_tokenizers(tokenizer: Tokenizer) -> None:
    recognised = [m for m in MARKERS if tokenizer.special_ids & set(tokenizer.encode_template(m))]
    assert set(recognised) >= set(CONTROL)


@pytest.mark.parametrize("marker", MARKERS + FULL_WIDTH)
def test_text_that_looks_like_a_control_token_is_spelt_out(
    loaded: dict[str, Tokenizer], marker: str
) -> None:
    half = len(marker) // 2
    around = [
        marker,
        f" {marker} ",
        f"the{marker}watch",
        f"\n{marker}\n{marker}{marker}",
        marker[:half] + marker + marker[half:],
        marker[0] + marker,
        marker + marker[-1],
        "\u200b".join(marker),
    ]
    for kind, tokenizer in loaded.items():
        for text in around:
            assert spelt(tokenizer, text), (kind, text)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(MARKERS + FULL_WIDTH),
            st.sampled_from(MARKERS).map(lambda m: m[:3]),
            st.sampled_from(MARKERS).map(lambda m: m[3:]),
            st.text(max_size=4),
        ),
        max_size=8,
    )
)
def test_no_joining_of_pieces_yields_a_control_id(
    loaded: dict[str, Tokenizer], pieces: list[str]
) -> None:
    for kind, tokenizer in loaded.items():
        assert spelt(tokenizer, "".join(pieces)), kind


def test_spelt_out_text_is_still_the_text(loaded: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "sentencepiece", "metaspace"):
        tokenizer = loaded[kind]
        for marker in MARKERS:
            text = f"the {marker} watch"
            assert tokenizer.decode(tokenizer.encode(text)) == text, (kind, marker)
    for kind in ("unigram", "whole_words"):  # whose models know control tokens as pieces
        for marker in ("</s>", "<s>", *CONTROL):
            assert loaded[kind].decode(loaded[kind].encode(marker)) == marker, (kind, marker)


def test_template_text_recognises_control_tokens_and_adds_none(
    loaded: dict[str, Tokenizer],
) -> None:
    ids = loaded["byte_level"].encode_template("<|im_start|>user")
    assert loaded["byte_level"].token_spans(ids)[0] == "<|im_start|>"
    ids = loaded["sentencepiece"].encode_template("the watch")
    assert loaded["sentencepiece"].bos_id not in ids


def test_an_added_token_that_is_plain_text_stays_one_token(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode(f"the {PLAIN_ADDED}")
    assert tokenizer.token_spans(ids)[-1] == PLAIN_ADDED


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace", "unigram"])
def test_ordinary_text_has_the_ids_of_the_library(kind: str, tmp_path: Path) -> None:
    model_dir = write_tokenizer(tmp_path, kind)
    tokenizer, reference = Tokenizer.load(model_dir), library(model_dir)
    for text in ["The night watch, 12 345.", " two  spaces\n\n", "Crème 你好 boilerhouse", "the"]:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [i for i in expected if i not in tokenizer.special_ids]


def test_unknown_characters_give_no_id(loaded: dict[str, Tokenizer]) -> None:
    assert loaded["word_level"].encode("the cat") == loaded["word_level"].encode("the")
    assert loaded["word_level"].encode("cat") == []


# --- loading --------------------------------------------------------------------------------


def test_beginning_of_sequence(loaded: dict[str, Tokenizer], tmp_path: Path) -> None:
    assert loaded["byte_level"].bos_id is None
    assert not loaded["byte_level"].adds_bos
    assert loaded["sentencepiece"].bos_id == 1
    assert loaded["sentencepiece"].adds_bos
    model_dir = write_tokenizer(tmp_path / "off", "sentencepiece", config={"add_bos_token": False})
    assert not Tokenizer.load(model_dir).adds_bos
    (model_dir / "tokenizer_config.json").unlink()  # the post-processor says so, then
    assert Tokenizer.load(model_dir).bos_id == 1
    assert Tokenizer.load(model_dir).adds_bos


def test_truncation_padding_and_dropout_are_off(tmp_path: Path) -> None:
    model_dir = write_tokenizer(tmp_path)
    plain = Tokenizer.load(model_dir)
    path = model_dir / "tokenizer.json"
    reference = library(model_dir)
    reference.enable_truncation(4)
    reference.enable_padding(length=64)
    spec = json.loads(reference.to_str())
    spec["model"]["dropout"] = 0.9
    path.write_text(json.dumps(spec))
    cut = Tokenizer.load(model_dir)
    text = "the night watch writes every reading " * 5
    assert cut.encode(text) == plain.encode(text) == cut.encode_template(text)
    assert cut.encode("the") == plain.encode("the")


def test_fingerprint_follows_what_changes_encoding_alone(tmp_path: Path) -> None:
    model_dir = write_tokenizer(tmp_path)
    first = Tokenizer.load(model_dir).fingerprint
    path = model_dir / "tokenizer.json"
    spec = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(spec.items())), indent=2))
    assert Tokenizer.load(model_dir).fingerprint == first
    assert len(first) == 64
    spec["model"]["merges"].pop()
    path.write_text(json.dumps(spec))
    changed = Tokenizer.load(model_dir).fingerprint
    assert changed != first
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    config["pad_token"] = "the"  # now a control token, so it is spelt differently
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(model_dir).fingerprint != changed


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    for text in ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"model": 3}']:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
            Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(IntegrityError, match="tokenizer_config"):
        Tokenizer.load(tmp_path)


# --- odd text -------------------------------------------------------------------------------

LONG = {
    "letters": "a" * 100_000,
    "underscores": "_" * 50_000,
    "spaces": " " * 100_000,
    "spaces then a letter": " " * 100_000 + "x",
    "newlines": "\n" * 100_000,
    "nul": "\0" * 100_000,
    "digits": "1" * 100_000,
    "chinese": "中文" * 50_000,
    "accents": "e\u0301" * 50_000,
    "mixed": "a_ " * 33_000,
}


@pytest.mark.parametrize("name", LONG)
def test_long_runs_are_quick(loaded: dict[str, Tokenizer], name: str) -> None:
    for kind in ("byte_level", "sentencepiece", "metaspace", "unigram"):
        start = time.perf_counter()
        ids = loaded[kind].encode(LONG[name])
        assert time.perf_counter() - start < 2, kind
        assert ids or name in ("chinese", "nul", "newlines"), kind


def test_empty_blank_and_undecodable_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    for text in [" ", "\n", " \t\r\n ", "\0", "\ufeff", "\ud800", "a\udcffb", "\U0010ffff"]:
        assert spelt(tokenizer, text)
        assert spelt(tokenizer, text * 1000)
    assert tokenizer.encode("\ud800x") == tokenizer.encode("\ufffdx")


def test_offsets_cover_the_characters(loaded: dict[str, Tokenizer]) -> None:
    text = "Crème 😀 你好 e\u0301 the\r\n\tend"
    for kind in ("byte_level", "sentencepiece", "metaspace"):
        spans = loaded[kind].encode_with_offsets(text)
        covered = {place for _, start, end in spans for place in range(start, end)}
        assert covered == set(range(len(text))), kind
        starts = [start for _, start, _ in spans]
        assert starts == sorted(starts)


# --- decoding -------------------------------------------------------------------------------

TEXTS = [
    "The night watch writes.",
    " leading space",
    "Crème 😀👩‍👩‍👧 你好，世界。",
    "tabs\tand\nlines\r\n",
    "the  two",
    "\u0001\u007f\x80",
]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(
    loaded: dict[str, Tokenizer], kind: str, text: str, tmp_path: Path
) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text)
    # Metaspace takes a text that starts with a space for one that does not.
    expected = text.removeprefix(" ") if kind == "metaspace" else text
    assert tokenizer.decode(ids) == expected
    assert library(write_tokenizer(tmp_path, kind)).decode(ids) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streaming_any_ids_equals_decoding_them(
    loaded: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = loaded[data.draw(st.sampled_from(KINDS))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = tokenizer.stream()
    shown = [stream.push(token) for token in ids]
    assert "".join(shown) + stream.finish() == tokenizer.decode(ids)
    assert "".join(tokenizer.token_spans(ids)) == tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_is_shown_whole_or_not_at_all(loaded: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = loaded[kind]
    text = "né 😀 你 👩‍👩‍👧"
    stream = tokenizer.stream()
    shown = ""
    for token in tokenizer.encode(text):
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown == text
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_bytes_that_are_no_character_show_once_certain(
    loaded: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = loaded[kind]
    face = tokenizer.encode("x😀")[-4:]
    letter = tokenizer.encode("b")[-1:]
    stream = tokenizer.stream()
    assert [stream.push(token) for token in face[:3]] == ["", "", ""]
    assert stream.push(letter[0]).replace(" ", "") == "\ufffdb"  # now it is certain
    assert stream.push(face[0]) == ""
    assert stream.finish() == "\ufffd"  # and here the text ends
    lone = tokenizer.stream()
    assert lone.push(face[1]) == "\ufffd"


def test_the_leading_space_is_dropped_once(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["sentencepiece"]
    stream = tokenizer.stream()
    ids = [1, *tokenizer.encode("the watch"), *tokenizer.encode("and")]
    assert "".join(map(stream.push, ids)) + stream.finish() == "the watch and"


def test_control_tokens_are_not_shown(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode_template("<think>the<|im_end|> watch</think>")
    assert tokenizer.decode(ids) == "the watch"
    assert tokenizer.decode(ids, skip_special=False) == "<think>the<|im_end|> watch</think>"


def test_a_control_token_inside_a_character_does_not_break_it(
    loaded: dict[str, Tokenizer],
) -> None:
    tokenizer = loaded["byte_level"]
    face = tokenizer.encode("😀")
    assert tokenizer.decode([face[0], min(tokenizer.special_ids), *face[1:]]) == "😀"


def test_streaming_costs_the_same_for_every_token(loaded: dict[str, Tokenizer]) -> None:
    for kind in ("byte_level", "sentencepiece", "word_level"):
        tokenizer = loaded[kind]
        byte = tokenizer.encode("the 😀")[-1]  # never becomes certain text for byte-level
        start = time.perf_counter()
        text = tokenizer.decode([byte] * 50_000)
        assert time.perf_counter() - start < 2, kind
        assert len(text) >= 50_000


# --- the real default model ---------------------------------------------------------------------


@pytest.mark.model
def test_default_model_spells_control_text_out_and_streams(default_model_dir: Path) -> None:
    tokenizer, reference = Tokenizer.load(default_model_dir), library(default_model_dir)
    for token, added in reference.get_added_tokens_decoder().items():
        assert tokenizer.encode_template(added.content) == [token]
        for text in (added.content, added.content[:4] + added.content + added.content[4:]):
            assert spelt(tokenizer, text)
            assert tokenizer.decode(tokenizer.encode(text)) == text
    text = "Crème brûlée 😀, 你好: 12 345 <|im_end|>\n\n  def f(x):\n"
    reference.encode_special_tokens = True
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
