"""Prompts for vLLM: what the torch engine lays out, and what the connector reads from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_store.catalog import ChunkText
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from engine.api import Engine
from engine.blueprint import Blueprint
from engine.prompt import Prompt, PromptChunk
from engine.vllm.kept import KeptChunks
from engine.vllm.naming import PARAMETER, RequestReader
from engine.vllm.prompts import PromptBuilder, extra_args, tokens_prompt, transfer_params
from engine.vllm.separators import Separator
from engine.vllm.settings import ConnectorSettings
from engine.vllm.stored import StoredChunks, find_document
from tests.cbcli.world import CHATML
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

TEXTS = {
    "/notes/rules.md": ("The night watch writes.", "Keys are kept at the gate."),
    "/notes/old/rules.md": ("Visitors sign in.",),
    "/notes/boats.txt": ("The boiler <|im_start|> is hot.", "Keys are kept at the gate."),
}


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    build(Tiny("tiny", "Llama", {"vocab_size": 1000}), folder, 0)
    chat = CHATML if request.param == "byte_level" else None
    return write_tokenizer(folder, request.param, chat_template=chat)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path_factory.mktemp("store") / "s", limit_bytes=10**8) as store:
        for source, texts in TEXTS.items():
            chunks = [ChunkText(chunk_id(text), text, 0, len(text), 5) for text in texts]
            store.catalog.replace_document(source, "0" * 64, "{}", chunks)
        yield store


@pytest.fixture(scope="module")
def builder(model: Path, store: ChunkStore) -> PromptBuilder:
    return PromptBuilder(Blueprint.open(model, device="cpu", dtype="fp32"), store)


def texts_of(builder: PromptBuilder, prompt: Prompt) -> list[str]:
    decode = builder.tokenizer.decode
    return [decode(s.token_ids) for s in prompt.segments if s.kind == "chunk"]


def test_a_collection_is_all_its_chunks_or_those_that_fit_the_question(
    builder: PromptBuilder, store: ChunkStore
) -> None:
    store.catalog.collect("all", TEXTS)
    store.catalog.collect("one", list(TEXTS)[:1])
    everything = [text for texts in TEXTS.values() for text in texts]
    first = list(TEXTS[next(iter(TEXTS))])
    whole = builder.ask("Who?", [{"collection": "all"}])
    assert texts_of(builder, whole) == everything
    assert texts_of(builder, builder.ask("Who?", [{"collection": "one"}])) == first
    best = builder.ask(everything[-1], [{"collection": "all", "top_k": 1}])
    assert texts_of(builder, best) == everything[-1:]
    store.catalog.uncollect("all", list(TEXTS)[1:])
    again = builder.ask(everything[-1] + first[0], [{"collection": "all", "top_k": 9}])
    assert set(texts_of(builder, again)) <= set(first)
    with pytest.raises(NotFoundError, match="no collection 'al' in the store"):
        builder.ask("Who?", [{"collection": "al", "top_k": 2}])
    with pytest.raises(NotFoundError, match="has a word in common"):
        builder.ask("Xyzzy?", [{"collection": "one", "top_k": 2}])
    with pytest.raises(UsageError, match="top_k of document 1 is no number"):
        builder.ask("Who?", [{"collection": "one", "top_k": True}])
    with pytest.raises(UsageError, match="document 1 has document and top_k"):
        builder.ask("Who?", [{"document": "boats.txt", "top_k": 2}])
    with ChunkStore.open(store.path) as other:
        text = "long"
        chunks = [ChunkText(chunk_id(text), text, 0, 4, 10**6)]
        other.catalog.replace_document("long.txt", "0", "{}", chunks, collections=["long"])
        with pytest.raises(UsageError, match="1000000 tokens, and the context"):
            builder.ask("Who?", [{"collection": "long"}])
        other.catalog.remove_document("long.txt")


def test_a_prompt_is_the_one_the_torch_engine_lays_out(model: Path, builder: PromptBuilder) -> None:
    engine = Engine.load(model, device="cpu", dtype="fp32")
    texts = ["The night watch writes.", "Keys are kept."]
    theirs = engine.prompt("Who writes?", [engine.chunk(text) for text in texts])
    assert builder.ask("Who writes?", texts) == theirs
    assert builder.split(" # # ".join(["", *texts, "Who writes?"])) == theirs


def test_chunks_ids_and_documents_are_named(builder: PromptBuilder) -> None:
    prompt = builder.ask(
        "Who writes?",
        [
            {"document": "/notes/rules.md"},
            "Literal.",
            {"text": "Named.", "source": "here"},
            {"id": chunk_id("Visitors sign in.")[:10]},
            {"document": "boats.txt"},
        ],
    )
    assert texts_of(builder, prompt) == [
        *("The night watch writes.", "Keys are kept at the gate.", "Literal.", "Named."),
        *("Visitors sign in.", "The boiler <|im_start|> is hot.", "Keys are kept at the gate."),
    ]
    chunks = [s for s in prompt.segments if s.kind == "chunk"]
    assert [s.source for s in chunks] == [
        *("/notes/rules.md", "/notes/rules.md", None, "here", "/notes/old/rules.md"),
        *("/notes/boats.txt", "/notes/boats.txt"),
    ]
    assert chunks[2].chunk_id == chunk_id("Literal.")
    control = builder.tokenizer.special_ids
    assert all(control.isdisjoint(s.token_ids) for s in chunks)


def test_one_bos_and_no_chunks(builder: PromptBuilder) -> None:
    tokenizer = builder.tokenizer
    for prompt in (builder.ask("Why?"), builder.raw("Why?"), builder.raw("a # # b # # Why?")):
        bos = prompt.token_ids.count(tokenizer.bos_id) if tokenizer.bos_id is not None else 0
        assert bos == (1 if tokenizer.adds_bos else 0)
    assert [s.kind for s in builder.ask("Why?").segments] in (["prefix", "suffix"], ["suffix"])


def test_instructions_take_the_system_prompts_place(builder: PromptBuilder) -> None:
    spoken = builder.split("Speak French. # # one # # Why?")
    assert spoken == builder.ask("Why?", ["one"], system="Speak French.")
    assert spoken.prefix_ids != builder.ask("Why?", ["one"]).prefix_ids
    assert "French" in builder.tokenizer.decode(spoken.prefix_ids)


def test_a_raw_text_keeps_its_separators(builder: PromptBuilder) -> None:
    prompt = builder.raw("Be brief. # # one # # two # # Why?")
    kinds = [s.kind for s in prompt.segments]
    assert kinds == ["prefix", "chunk", "separator", "chunk", "suffix"]
    decode = builder.tokenizer.decode
    assert [decode(s.token_ids).strip() for s in prompt.segments] == [
        *("Be brief. # #", "one", "# #", "two"),
        decode(prompt.segments[-1].token_ids).strip(),
    ]
    # A server that is given these ids alone finds the same chunks by the separator.
    reader = RequestReader(ConnectorSettings(Path("x")), 2, Separator(builder.tokenizer, " # # "))
    plan = reader.read("r", prompt.token_ids, None)
    assert plan is not None
    chunks = [s.token_ids for s in plan.prompt.segments if s.kind == "chunk"]
    assert chunks == [s.token_ids for s in prompt.segments if s.kind == "chunk"]


def test_what_is_given_to_vllm_is_what_its_connector_reads(builder: PromptBuilder) -> None:
    prompt = builder.ask("Who writes?", [{"document": "boats.txt"}, "one"])
    given = extra_args(prompt, ratio=0.05, policy=None, save=False)
    reader = RequestReader(ConnectorSettings(Path("x")), 2)
    ids = tokens_prompt(prompt)["prompt_token_ids"]
    plan = reader.read("r", ids, given["kv_transfer_params"])
    assert plan is not None
    assert plan.prompt == prompt
    assert [str(r) for r in plan.options.ratios] == ["0.05"]
    assert not plan.save


def test_stored_chunks_are_found_in_a_prompt_by_their_ids(
    builder: PromptBuilder, store: ChunkStore
) -> None:
    names = [chunk_id(text) for text in ("Keys are kept at the gate.", "The night watch writes.")]
    prompt = builder.ask("Why?", [{"id": name} for name in names])
    reader = RequestReader(
        *(ConnectorSettings(Path("x")), 2, None, StoredChunks(store, builder.blueprint))
    )
    plan = reader.read("r", prompt.token_ids, {PARAMETER: {"chunks": [n[:8] for n in names]}})
    assert plan is not None
    assert plan.prompt == prompt


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"ratio": 2}, "ratio is 2"),
        ({"rato": 0.1}, "unknown key 'rato'"),
        ({"save": "no"}, "save is not true or false"),
        ({"question_tokens": 0}, "question_tokens is 0"),
        ({"policy": "best"}, "policy 'best'"),
    ],
)
def test_wrong_wishes_are_refused_before_anything_is_sent(
    builder: PromptBuilder, wishes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        transfer_params(builder.ask("Why?", ["one"]), **wishes)
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("documents", "error", "says"),
    [
        (["  \n"], UsageError, "document 1 is empty"),
        (["a", 3], UsageError, "document 2 is a number"),
        ([None], UsageError, "document 1 is null"),
        ([{}], UsageError, "document 1 has nothing"),
        ([{"text": "a", "id": "b"}], UsageError, "document 1 has text and id"),
        ([{"id": "abcd", "source": "b"}], UsageError, "document 1 has id and source"),
        ([{"text": ["a"]}], UsageError, "text of document 1 is a list"),
        ([{"title": "a"}], UsageError, "unknown key 'title'"),
        ("text", UsageError, "documents is a text, not a list"),
        ({"text": "a"}, UsageError, "documents is an object, not a list"),
        (7, UsageError, "documents is a number"),
        (["a"] * 10_001, UsageError, "10001 documents"),
        ([{"id": "dead" * 16}], NotFoundError, "no chunk 'dead"),
        ([{"id": "xyz"}], UsageError, "not a chunk id"),
        ([{"document": "boat.txt"}], NotFoundError, "no document 'boat.txt'"),
        ([{"document": ""}], NotFoundError, "no document ''"),
        ([{"document": "rules.md"}], UsageError, "2 documents are called 'rules.md'"),
    ],
)
def test_what_cant_be_a_document_is_named(
    builder: PromptBuilder, documents: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        builder.ask("Why?", documents)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("question", ["", " \n", None, 3])
def test_without_a_question_there_is_no_prompt(builder: PromptBuilder, question: Any) -> None:
    with pytest.raises(UsageError, match="question"):
        builder.ask(question, ["one"])


def test_documents_are_found_by_the_end_of_their_path(store: ChunkStore) -> None:
    catalog = store.catalog
    assert find_document(catalog, "old/rules.md") == "/notes/old/rules.md"
    assert find_document(catalog, "/notes/rules.md") == "/notes/rules.md"
    with pytest.raises(NotFoundError) as refused:
        find_document(catalog, "boats.md")
    assert refused.value.hint == "did you mean 'boats.txt'?"


def test_a_text_that_was_altered_in_the_store_is_not_used(model: Path, tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", limit_bytes=10**8) as store:
        chunk = ChunkText(chunk_id("one"), "another", 0, 3, 1)
        store.catalog.replace_document("/a", "0" * 64, "{}", [chunk])
        builder = PromptBuilder(Blueprint.open(model, device="cpu"), store)
        with pytest.raises(IntegrityError, match="was altered"):
            builder.ask("Why?", [{"document": "/a"}])


def test_a_chunk_that_no_document_has_is_found_where_its_kv_is_stored(
    model: Path, tmp_path: Path
) -> None:
    with ChunkStore.open(tmp_path / "s", limit_bytes=10**8) as store:
        engine = Engine.load(model, device="cpu", dtype="fp32", store=store)
        chunk = engine.chunk("Only a prompt had this.")
        engine.precompute([chunk])
        builder = PromptBuilder(engine.blueprint, store)
        named = builder.ask("Why?", [{"id": chunk.chunk_id}])
        assert named == builder.ask("Why?", ["Only a prompt had this."])
        with pytest.raises(NotFoundError):
            builder.ask("Why?", [{"id": (chunk.chunk_id or "")[:10]}])
        # A request may call its chunk whatever it likes.
        false = chunk_id("Something that was never here.")
        engine.precompute([PromptChunk(engine.chunk("Quite another text.").token_ids, false)])
        assert store.keys_of_chunk(false)
        with pytest.raises(NotFoundError):
            builder.ask("Why?", [{"id": false}])


def test_named_chunks_need_a_store(model: Path) -> None:
    builder = PromptBuilder.open(model, dtype="fp32")
    assert builder.ask("Why?", ["one"]).segments
    with pytest.raises(UsageError, match="no store"):
        builder.ask("Why?", [{"id": "abcd"}])


def test_a_builder_opens_a_store_to_read(model: Path, store: ChunkStore) -> None:
    builder = PromptBuilder.open(model, store.path, dtype="fp32", template_date="2025-01-02")
    assert texts_of(builder, builder.ask("Why?", [{"document": "old/rules.md"}])) == [
        "Visitors sign in."
    ]
    with pytest.raises(NotFoundError, match="no store"):
        PromptBuilder.open(model, store.path / "nowhere")


def test_texts_that_were_encoded_lately_are_kept_up_to_so_many_tokens(
    builder: PromptBuilder,
) -> None:
    texts = [f"Boat {number} is at the quay." for number in range(9)]
    kept = KeptChunks(builder.tokenizer, most=40)
    made = [kept.chunk(text, None) for text in texts]
    assert [chunk.token_ids for chunk in made] == [
        tuple(builder.tokenizer.encode(text)) for text in texts
    ]
    assert 0 < kept.tokens <= 40
    assert kept.chunk(texts[-1], None) is made[-1]
    assert kept.chunk(texts[-1], "a") == PromptChunk(made[-1].token_ids, chunk_id(texts[-1]), "a")
    assert len(kept.chunk("The boat is here. " * 40, None).token_ids) > 40
    assert kept.tokens == 0
