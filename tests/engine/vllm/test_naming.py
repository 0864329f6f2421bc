"""How requests name their chunks: whatever they say, it is read right or refused in one line."""

import functools
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from engine.options import BlendOptions
from engine.prompt import Prompt, PromptChunk
from engine.tokenizer import Tokenizer
from engine.vllm.naming import (
    PARAMETER,
    RequestReader,
    from_chunks,
    from_segments,
    from_separators,
    listed,
    options_of,
)
from engine.vllm.separators import Separator
from engine.vllm.settings import ConnectorSettings
from tests.engine.tiny_tokenizers import write_tokenizer

SEP = " # # "
KINDS = ("byte_level", "byte_level_nfkc", "sentencepiece", "metaspace")
UNSPELT = ("unigram", "whole_words", "word_level")  # these have no "#"
CHUNKS = (
    "The night watch writes every reading.",
    "Keys are kept at the gate;\nthe second key is in the office.",
    "Visitors sign in, and # they sign out again ##.\n",
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Tokenizer:
    return load(request.param, tmp_path_factory.mktemp("tokenizer"))


def load(kind: str, folder: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(folder / kind, kind))


def shape(prompt: Prompt | None) -> list[tuple[str, int]]:
    return [] if prompt is None else [(s.kind, len(s.token_ids)) for s in prompt.segments]


def check(prompt: Prompt, ids: Sequence[int]) -> None:
    """What every prompt is, however it was named."""
    assert prompt.token_ids == tuple(ids)
    starts = [s.start for s in prompt.segments]
    assert starts == sorted(starts)
    assert all(s.token_ids for s in prompt.segments)
    kinds = [s.kind for s in prompt.segments]
    assert kinds[-1] == "suffix"
    assert kinds.count("suffix") == 1
    assert "prefix" not in kinds[1:]


# Separators


def test_a_text_that_was_encoded_whole_is_split_where_its_separators_are(
    tokenizer: Tokenizer,
) -> None:
    """No chunk loses a token, and it is the same chunk wherever it stands."""
    separator = Separator(tokenizer, SEP)
    found: dict[str, set[tuple[int, ...]]] = {text: set() for text in CHUNKS}
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 0, 2)):
        texts = [CHUNKS[index] for index in order]
        ids = tokenizer.encode(SEP.join(["Be brief.", *texts, "What is kept?"]))
        prompt = from_separators(ids, separator)
        assert prompt is not None
        check(prompt, ids)
        chunks = [s for s in prompt.segments if s.kind == "chunk"]
        spelt = [b"".join(tokenizer.pieces(s.token_ids, whole=True)) for s in chunks]
        assert [piece.decode().strip() for piece in spelt] == [text.strip() for text in texts]
        for text, segment in zip(texts, chunks, strict=True):
            found[text].add(segment.token_ids)
        assert prompt.segments[0].kind == "prefix"
        assert prompt.segments[-1].kind == "suffix"
    assert [len(ids) for ids in found.values()] == [1, 1, 1]


def test_parts_that_were_encoded_alone_are_found_as_they_were(tokenizer: Tokenizer) -> None:
    separator = Separator(tokenizer, SEP)
    between = list(separator.ids)
    parts = [tokenizer.encode(text) for text in ("Be brief.", *CHUNKS, "What is kept?")]
    ids = [token for part in parts for token in (*part, *between)][: -len(between)]
    prompt = from_separators(ids, separator)
    assert prompt is not None
    check(prompt, ids)
    assert [s.token_ids for s in prompt.segments if s.kind == "chunk"] == [
        tuple(part) for part in parts[1:-1]
    ]
    # What is before the first chunk is the prefix: so that chunk can be exact.
    assert prompt.segments[0].token_ids == (*parts[0], *between)
    assert prompt.segments[-1].token_ids == (*between, *parts[-1])


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("What is kept?", []),
        ("", []),
        ("#", []),  # shorter than the separator
        ("# #", []),
        (SEP, []),
        ("Be brief. # # Why?", []),  # instructions and a question
        ("Be brief. # #  # # Why?", []),  # nothing between them
        ("Be brief. # # \n \n # # Why?", []),
        ("Be brief. # # one # # Why?", ["prefix", "chunk", "suffix"]),
        (" # # one # # Why?", ["prefix", "chunk", "suffix"]),
        ("# # one # # Why?", ["prefix", "chunk", "suffix"]),  # stripped on its way
        ("Be brief.\n# # one\n# #\nWhy?", ["prefix", "chunk", "suffix"]),
        ("a # # one # #  # # two # # Why?", ["prefix", "chunk", "separator", "chunk", "suffix"]),
        ("a # # one # # \n\n # # Why?", ["prefix", "chunk", "suffix"]),
        ("a # # one # # ", ["prefix", "chunk", "suffix"]),  # no question: the separator is left
        ("a # # one # #", ["prefix", "chunk", "suffix"]),
        ("C # is a key # and so is D # E", []),
        ("a## ##b##c##d", []),
    ],
)
def test_what_a_text_with_separators_is(tokenizer: Tokenizer, text: str, kinds: list[str]) -> None:
    ids = tokenizer.encode(text)
    prompt = from_separators(ids, Separator(tokenizer, SEP))
    assert [kind for kind, _ in shape(prompt)] == kinds
    if prompt is not None:
        check(prompt, ids)


def test_a_control_token_in_front_does_for_the_blank_before_a_separator(
    tokenizer: Tokenizer,
) -> None:
    control = min(tokenizer.special_ids)
    text = "# # The night watch. # # Keys are kept. # #"
    ids = [control, *tokenizer.encode(text), control, *tokenizer.encode("why")]
    prompt = from_separators(ids, Separator(tokenizer, SEP))
    assert [kind for kind, _ in shape(prompt)] == [
        *("prefix", "chunk", "separator", "chunk", "suffix")
    ]


@pytest.mark.parametrize("kind", UNSPELT)
def test_a_separator_that_cant_be_spelt_is_found_nowhere(kind: str, tmp_path: Path) -> None:
    tokenizer = load(kind, tmp_path)
    separator = Separator(tokenizer, SEP)
    assert separator.ids == ()
    ids = tokenizer.encode("the watch    the boiler    the # # watch    the # # boiler")
    assert from_separators(ids, separator) is None


@pytest.mark.parametrize("text", ["\n\n", "<|x|>", "§", "[SEP]", "\n---\n", "<|im_start|>", "#"])
def test_other_separators(text: str, tmp_path: Path) -> None:
    tokenizer = load("byte_level", tmp_path)
    ids = tokenizer.encode_template(text.join(["Be brief.", "one § two 好", "a [SE b", "Why?"]))
    prompt = from_separators(ids, Separator(tokenizer, text))
    expected = {"§": 5, "#": 5}.get(text, 5)
    assert prompt is not None
    check(prompt, ids)
    chunks = [tokenizer.decode(s.token_ids) for s in prompt.segments if s.kind == "chunk"]
    assert len(prompt.segments) == expected + (2 if text == "§" else 0)
    assert chunks[-1] == "a [SE b"


@pytest.mark.model
def test_a_real_tokenizer_merges_the_separators_blanks_with_the_words(
    default_model_dir: Path,
) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    separator = Separator(tokenizer, SEP)
    ids = tokenizer.encode("Be brief. # # The night watch. # # \n Keys. # # - Boats # # Why?")
    prompt = from_separators(ids, separator)
    assert prompt is not None
    pieces = [b"|".join(tokenizer.pieces(s.token_ids)) for s in prompt.segments]
    assert pieces == [
        b"Be| brief|.| #| #",
        b" The| night| watch|.",
        b" #| #",
        b" \n| Keys|.",
        b" #| #",
        b" -| Bo|ats",
        b" #| #| Why|?",
    ]


class Spelling:
    """A tokenizer of tokens that are known by what they spell."""

    special_ids = frozenset({0})

    def __init__(self, *pieces: str) -> None:
        self.all = ("<s>", *pieces)

    def encode(self, text: str) -> list[int]:
        return [self.all.index(char) for char in text]

    def pieces(self, ids: Sequence[int], *, whole: bool = False) -> list[bytes]:
        return [self.all[token].encode() for token in ids]


@pytest.mark.parametrize(
    ("separator", "pieces", "places"),
    [
        ("##", "a ## b", [(1, 2)]),
        ("##", "a## b", [(0, 1)]),  # nobody's alone, and always computed
        ("##", "a##b", [(0, 1)]),
        ("\n\n", "a. \n\n b", [(1, 2)]),
        ("\n\n", "a.\n\n b", [(1, 1)]),  # its blanks are the left one's
        ("\n\n", "a. \n\nb", [(1, 1)]),
        ("\n\n", "a.\n \nb", [(1, 1)]),
        ("\n\n", "a.\n\nb c", [(0, 1)]),
        (" # ", "a \\x20 # \\x20b c", [(1, 3)]),
        (" # ", "a \\x20#\\x20 b", [(1, 2)]),
        (" # ", "a\\x20 # \\x20b", [(1, 2)]),
        (" # ", "a\\x20#\\x20b c", [(0, 1)]),
        ("<s>", "a <s> b", [(1, 2)]),
        ("<", "a <s> b", []),  # a part of a control token is none
    ],
)
def test_a_token_that_is_partly_the_separators(
    separator: str, pieces: str, places: list[tuple[int, int]]
) -> None:
    """Tokens stand between blanks here; \\x20 is one."""
    tokens = [piece.replace("\\x20", " ") for piece in pieces.split(" ")]
    chars = sorted(set(separator))
    tokenizer = Spelling(*dict.fromkeys([*chars, *tokens]))
    ids = [tokenizer.all.index(token) for token in tokens]
    assert Separator(tokenizer, separator).places(ids) == places  # type: ignore[arg-type]


@functools.cache
def byte_level() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load("byte_level", Path(folder))


PIECES = st.sampled_from(["#", " ", "# #", SEP, "\n", "a", "word. ", "好", "##", "<|im_start|>"])


@given(st.lists(PIECES, max_size=30), st.sampled_from([SEP, "\n\n", "#", "##", "a", " "]))
def test_any_ids_are_split_without_loss(parts: list[str], text: str) -> None:
    tokenizer = byte_level()
    ids = [token for part in parts for token in tokenizer.encode_template(part)]
    for given_ids in (ids, tokenizer.encode_template("".join(parts))):
        separator = Separator(tokenizer, text)
        prompt = from_separators(given_ids, separator)
        places = separator.places(given_ids)
        assert all(0 <= a <= b <= len(given_ids) for a, b in places)
        assert all(first[1] <= second[0] for first, second in pairwise(places))
        if prompt is not None:
            check(prompt, given_ids)
            assert any(s.kind == "chunk" for s in prompt.segments)


@given(st.lists(st.integers(-5, 2000), max_size=40))
def test_any_numbers_can_be_looked_through(ids: list[int]) -> None:
    from_separators(ids, Separator(byte_level(), SEP))


# Segments


IDS = tuple(range(100, 140))
NAME = chunk_id("x")


def test_segments_as_they_are_listed() -> None:
    given_segments = [
        {"kind": "prefix", "tokens": 3},
        {"kind": "chunk", "tokens": 10, "chunk_id": NAME, "source": "a.md"},
        {"kind": "separator", "tokens": 2},
        {"kind": "chunk", "tokens": 10},
    ]
    prompt = from_segments(IDS, given_segments)
    check(prompt, IDS)
    assert shape(prompt) == [
        *(("prefix", 3), ("chunk", 10), ("separator", 2), ("chunk", 10), ("suffix", 15))
    ]
    assert (prompt.segments[1].chunk_id, prompt.segments[1].source) == (NAME, "a.md")
    assert listed(prompt) == given_segments
    assert from_segments(IDS, listed(prompt)) == prompt
    assert from_segments(IDS, [*given_segments, {"kind": "suffix", "tokens": 4}]) == prompt


def test_what_leads_to_the_first_chunk_is_prefix_and_what_follows_the_last_is_suffix() -> None:
    prompt = from_segments(
        IDS,
        [
            {"kind": "prefix", "tokens": 0},
            {"kind": "separator", "tokens": 2},
            {"kind": "chunk", "tokens": 10},
            {"kind": "chunk", "tokens": 0},
            {"kind": "separator", "tokens": 1},
            {"kind": "separator", "tokens": 1},
            {"kind": "chunk", "tokens": 5},
            {"kind": "separator", "tokens": 5},
        ],
    )
    assert shape(prompt) == [
        *(("prefix", 2), ("chunk", 10), ("separator", 2), ("chunk", 5), ("suffix", 21))
    ]


@pytest.mark.parametrize(
    ("given_segments", "says"),
    [
        ("chunk", "segments is not a list"),
        ({}, "segments is not a list"),
        ([1], "segment 1 is not an object"),
        ([{"kind": "chunk"}], "tokens of segment 1 is not a whole number"),
        ([{"tokens": 3}], "segment 1 is of an unknown kind"),
        ([{"kind": "chunks", "tokens": 3}], "unknown kind"),
        ([{"kind": ["chunk"], "tokens": 3}], "unknown kind"),
        ([{"kind": "chunk", "tokens": -1}], "not a number from 0"),
        ([{"kind": "chunk", "tokens": 1.5}], "not a whole number"),
        ([{"kind": "chunk", "tokens": True}], "not a whole number"),
        ([{"kind": "chunk", "tokens": "3"}], "not a whole number"),
        ([{"kind": "chunk", "tokens": 10**5000}], "far outside"),
        ([{"kind": "chunk", "tokens": 41}], "has 41 tokens, 40 are left"),
        ([{"kind": "chunk", "tokens": 30}, {"kind": "chunk", "tokens": 11}], "segment 2 has 11"),
        ([{"kind": "chunk", "tokens": 40}], "ends without a question"),
        ([{"kind": "chunk", "tokens": 5, "chunk_id": "abc"}], "not a chunk's id"),
        ([{"kind": "chunk", "tokens": 5, "chunk_id": 7}], "not a chunk's id"),
        ([{"kind": "chunk", "tokens": 5, "source": []}], "source of segment 1"),
        ([{"kind": "chunk", "tokens": 5, "source": "x" * 5000}], "source of segment 1"),
        ([{"kind": "chunk", "token": 5}], "unknown key 'token'"),
        ([{"kind": "chunk", "tokens": 5}, {"kind": "prefix", "tokens": 5}], "prefix is not the"),
        ([{"kind": "suffix", "tokens": 5}, {"kind": "chunk", "tokens": 5}], "suffix is not the"),
        ([{"kind": "chunk", "tokens": 0}] * 20_001, "at most 20000"),
    ],
)
def test_wrong_segments_are_refused_in_one_line(given_segments: Any, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_segments(IDS, given_segments)
    assert says in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
SEGMENT = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["prefix", "chunk", "separator", "suffix"]) | JSON,
        "tokens": st.integers(-2, 45) | JSON,
        "chunk_id": JSON,
        "source": JSON,
    },
)
WISH = st.fixed_dictionaries(
    {},
    optional={
        "segments": st.lists(SEGMENT, max_size=5) | JSON,
        "chunks": st.lists(st.sampled_from(["aaaa", "bbbb"]) | JSON, max_size=3) | JSON,
        "ratio": st.sampled_from([0.16, "0.1", [0.3, 0.1], float("nan"), 2]) | JSON,
        "policy": st.sampled_from(["value", "question:layers=9", "explicit"]) | JSON,
        "threshold": JSON,
        "check_layers": st.sampled_from([1, [1, 2], [0], 99]) | JSON,
        "indices": st.lists(st.integers(-1, 50)) | JSON,
        "mode": st.sampled_from(["blend", "reuse", "full", "prefix"]) | JSON,
        "save": JSON,
        "trace": JSON,
        "question_tokens": st.integers(-1, 50) | JSON,
        "seed": JSON,
    },
)


class Stored:
    known = {"aaaa": PromptChunk((101, 102, 103), NAME), "bbbb": PromptChunk((110, 111), NAME)}

    def chunk(self, name: str) -> PromptChunk:
        if name not in self.known:
            raise NotFoundError(f"no chunk {name!r} in the store")
        return self.known[name]


def reader(**settings: Any) -> RequestReader:
    return RequestReader(ConnectorSettings(Path("x"), **settings), layers=4, stored=Stored())


@given(WISH | JSON)
def test_whatever_a_request_says_is_read_or_refused(wish: Any) -> None:
    try:
        plan = reader().read("r", IDS, {PARAMETER: wish})
    except CacheblendError as refused:
        said = refused.message
        assert "\n" not in said
        assert len(said) < 600
        return
    if plan is not None:
        check(plan.prompt, IDS)
        assert 0 < plan.end < len(IDS)
        assert plan.question_tokens is None or 1 <= plan.question_tokens <= len(IDS) - plan.end
        plan.options.check_model(4)


# Chunk ids


def test_chunks_are_found_by_their_ids_in_order() -> None:
    first, second = PromptChunk((101, 102, 103), NAME, "a"), PromptChunk((110, 111), NAME)
    prompt = from_chunks(IDS, [first, second])
    check(prompt, IDS)
    assert shape(prompt) == [
        *(("prefix", 1), ("chunk", 3), ("separator", 6), ("chunk", 2), ("suffix", 28))
    ]
    with pytest.raises(UsageError, match=r"chunk 2 .* not behind the one before it"):
        from_chunks(IDS, [second, first])


def test_a_chunk_may_be_there_twice() -> None:
    ids = (7, 1, 2, 9, 1, 2, 5)
    twice = [PromptChunk((1, 2), NAME)] * 2
    assert shape(from_chunks(ids, twice)) == [
        *(("prefix", 1), ("chunk", 2), ("separator", 1), ("chunk", 2), ("suffix", 1))
    ]
    with pytest.raises(UsageError, match="chunk 3"):
        from_chunks(ids, [*twice, twice[0]])


def test_ids_are_compared_whole() -> None:
    """The bytes of an id may stand across two others."""
    ids = (0x01000000, 0x00000002, 0x0201, 9)
    with pytest.raises(UsageError, match="isn't in the prompt"):
        from_chunks(ids, [PromptChunk((0x0201 << 8,), NAME)])
    assert shape(from_chunks(ids, [PromptChunk((0x0201,), NAME)])) == [
        *(("prefix", 2), ("chunk", 1), ("suffix", 1))
    ]


def test_no_chunk_at_the_end_and_no_unknown_one() -> None:
    with pytest.raises(UsageError, match="without a question"):
        from_chunks((1, 2), [PromptChunk((1, 2), NAME)])
    with pytest.raises(NotFoundError, match="no chunk 'cccc'"):
        reader().read("r", IDS, {PARAMETER: {"chunks": ["cccc"]}})
    with pytest.raises(UsageError, match="not a list of chunk ids"):
        reader().read("r", IDS, {PARAMETER: {"chunks": [1]}})
    with pytest.raises(UsageError, match="exclude each other"):
        reader().read("r", IDS, {PARAMETER: {"chunks": [], "segments": []}})


# A request's own wishes


CHUNK = [{"kind": "chunk", "tokens": 20}]


def read(**wish: Any) -> Any:
    return reader().read("r", IDS, {PARAMETER: {"segments": CHUNK, **wish}})


def test_too_many_chunks_are_too_much() -> None:
    ids = range(5000)
    segments = [{"kind": "chunk", "tokens": 1}, {"kind": "separator", "tokens": 1}] * 2001
    with pytest.raises(UsageError, match="2001 chunks; at most 2000"):
        reader().read("r", ids, {PARAMETER: {"segments": segments}})
    assert reader().read("r", ids, {PARAMETER: {"segments": segments[:-2]}}) is not None
    with pytest.raises(UsageError, match="chunks lists 2001"):
        reader().read("r", ids, {PARAMETER: {"chunks": ["aaaa"] * 2001}})


def test_plain_requests_name_nothing() -> None:
    for params in (None, {}, {"other": 1}, {PARAMETER: None}, {PARAMETER: {}}):
        assert reader().read("r", IDS, params) is None
    assert read(segments=[]) is None
    assert read(mode="full") is None


def test_wishes_are_over_the_connectors_own() -> None:
    plan = read(ratio=0.05, policy="value", save=False, question_tokens=3)
    assert [str(r) for r in plan.options.ratios] == ["0.05"]
    assert (plan.options.policy, plan.save) == ("value", False)
    assert plan.question_tokens == 3
    assert read(indices=[3, 1]).options.indices == (1, 3)
    assert read(trace=None, ratio=None).options == BlendOptions()


@pytest.mark.parametrize(
    ("own", "wish", "found"),
    [
        (None, {"trace": "full"}, None),
        (None, {"trace": True}, None),
        ("basic", {}, "basic"),
        ("basic", {"trace": "full"}, "basic"),
        ("full", {"trace": "full"}, "full"),
        ("full", {"trace": True}, "full"),
        ("full", {"trace": "basic"}, "basic"),
        ("full", {"trace": None}, "full"),
        ("full", {"trace": False}, None),
    ],
)
def test_no_more_is_traced_than_the_connector_says(
    own: str | None, wish: dict[str, Any], found: str | None
) -> None:
    plan = reader(trace=own).read("r", IDS, {PARAMETER: {"segments": CHUNK, **wish}})
    assert plan is not None
    assert plan.trace == found


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"ratio": float("inf")}, "ratio is inf"),
        ({"ratio": 1.5}, "ratio is 1.5"),
        ({"ratio": {}}, "ratio is {}"),
        ({"ratio": 0.1, "threshold": 0.5}, "exclude each other"),
        ({"policy": "best"}, "policy 'best' is unknown"),
        ({"policy": 3}, "policy is 3"),
        ({"check_layers": 9, "policy": "value"}, "check layer 9"),
        ({"check_layers": 0}, "check layer 0"),
        ({"indices": [3, 40]}, "beyond the prompt"),
        ({"indices": [-1]}, "one of indices"),
        ({"indices": ["a"]}, "one of indices"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"save": "no"}, "save is not true or false"),
        ({"trace": "all"}, "trace is unknown"),
        ({"trace": 1}, "trace is unknown"),
        ({"question_tokens": 0}, "question_tokens is 0"),
        ({"question_tokens": 21}, "question_tokens is 21"),
        ({"rato": 0.1}, "unknown key 'rato'"),
        ({"loader": "sync"}, "unknown key 'loader'"),
    ],
)
def test_wrong_wishes_are_refused_in_one_line(wish: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(**wish)
    assert says in refused.value.message
    assert "\n" not in refused.value.message


def test_what_a_request_says_of_ratio_or_threshold_replaces_the_connectors() -> None:
    share = BlendOptions.of(policy="value", threshold=0.5)
    assert options_of({"ratio": 0.1}, share).threshold is None
    assert options_of({"policy": "question"}, share).threshold == share.threshold
    steps = BlendOptions.of(check_layers=[1, 2], ratio=[0.3, 0.1])
    assert str(options_of({"threshold": 0.4}, steps).threshold) == "0.4"
    assert [str(r) for r in options_of({"check_layers": [1, 2, 3]}, steps).ratios] == ["0.3"] * 3
    assert options_of({"ratio": [0.2, 0.1]}, steps).check_layers == (1, 2)
    assert options_of({}, steps) is steps
