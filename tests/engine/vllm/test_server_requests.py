"""A server's requests with documents or separators, on their way to vLLM."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from cache_store.catalog import ChunkText
from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.vllm.naming import PARAMETER, RequestReader
from engine.vllm.prompts import PromptBuilder
from engine.vllm.server_app import Documents
from engine.vllm.server_requests import RequestLayout
from engine.vllm.settings import ConnectorSettings
from tests.cbcli.world import CHATML
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

TEXT = "The night watch writes."
ASK = [{"role": "user", "content": "Who writes?"}]
SEP = " # # "


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptBuilder]:
    root = tmp_path_factory.mktemp("requests")
    build(Tiny("tiny", "Llama", {"vocab_size": 1000}), root / "tiny", 0)
    write_tokenizer(root / "tiny", chat_template=CHATML)
    with ChunkStore.open(root / "store", limit_bytes=10**8) as store:
        chunk = ChunkText(chunk_id(TEXT), TEXT, 0, len(TEXT), 5)
        store.catalog.replace_document("/notes/rules.md", "0" * 64, "{}", [chunk])
        yield PromptBuilder(Blueprint.open(root / "tiny", device="cpu", dtype="fp32"), store)


@pytest.fixture(scope="module")
def layout(builder: PromptBuilder, tmp_path_factory: pytest.TempPathFactory) -> RequestLayout:
    settings = ConnectorSettings.of({"store": str(tmp_path_factory.mktemp("none"))}, env={})
    return RequestLayout(builder, RequestReader(settings, 2), SEP, 400)


def ids(body: dict[str, Any]) -> list[int]:
    found: list[int] = body["kv_transfer_params"]["prompt_token_ids"]
    return found


def test_documents_become_the_ids_of_the_prompt_that_ask_lays_out(
    layout: RequestLayout, builder: PromptBuilder
) -> None:
    body = {"messages": ASK, "documents": [{"name": "rules.md"}], "temperature": 0}
    made = layout.chat(body)
    assert ids(made) == list(builder.ask("Who writes?", [TEXT]).token_ids)
    assert made["messages"] == ASK
    assert made["temperature"] == 0
    assert "documents" not in made
    assert body["documents"]  # what was given is left as it was
    kinds = [s["kind"] for s in made["kv_transfer_params"][PARAMETER]["segments"]]
    assert kinds == ["prefix", "chunk"]


@pytest.mark.parametrize(
    "document",
    [
        TEXT,
        {"text": TEXT},
        {"content": TEXT},
        {"contents": TEXT},
        {"id": chunk_id(TEXT)[:12]},
        {"name": "rules.md"},
        {"source": "/notes/rules.md"},
        {"document": "notes/rules.md"},
        {"title": "The night", "text": "watch"},
    ],
)
def test_forms_of_a_document(layout: RequestLayout, builder: PromptBuilder, document: Any) -> None:
    text = "The night\n\nwatch" if "title" in document else TEXT
    made = layout.chat({"messages": ASK, "documents": [document]})
    assert ids(made) == list(builder.ask("Who writes?", [text]).token_ids)


def test_system_messages_and_parts_of_text(layout: RequestLayout, builder: PromptBuilder) -> None:
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "writes?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": parts},
    ]
    made = layout.chat({"messages": messages, "documents": [TEXT]})
    asked = builder.ask("Who\nwrites?", [TEXT], system="Be brief.\n\nBe kind.")
    assert ids(made) == list(asked.token_ids)


def test_earlier_turns_are_part_of_the_question(
    layout: RequestLayout, builder: PromptBuilder
) -> None:
    turns = [*ASK, {"role": "assistant", "content": "The watch."}]
    made = layout.chat(
        {"messages": [*turns, {"role": "user", "content": "When?"}], "documents": [TEXT]}
    )
    question = "Who writes?\nAnswer: The watch.\n\nQuestion: When?"
    assert ids(made) == list(builder.ask(question, [TEXT]).token_ids)


def test_separators_in_the_last_message(layout: RequestLayout, builder: PromptBuilder) -> None:
    text = SEP.join(["Be kind.", TEXT, "Keys are kept.", "Who writes?"])
    made = layout.chat({"messages": [{"role": "user", "content": text}]})
    asked = builder.ask("Who writes?", [TEXT, "Keys are kept."], system="Be kind.")
    assert ids(made) == list(asked.token_ids)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK},
        {"messages": [{"role": "user", "content": "One # # two"}]},
        {"messages": [{"role": "user", "content": "One # # two # # "}]},
        {"messages": [{"role": "user", "content": SEP.join("abc")}], "tools": [{"type": "x"}]},
        {"messages": [{"role": "assistant", "content": SEP.join("abc")}]},
        {"messages": "nonsense"},
        {},
    ],
)
def test_a_chat_that_names_no_chunks_is_left_as_it_is(layout: RequestLayout, body: Any) -> None:
    assert layout.chat(body) == body


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Who writes?"},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": SEP.join("abc"), "echo": True},
        {"prompt": SEP.join("abc"), "add_special_tokens": False},
        {},
    ],
)
def test_a_completion_that_names_no_chunks_is_left_as_it_is(
    layout: RequestLayout, body: Any
) -> None:
    assert layout.completion(body) == body


def test_separators_in_a_completion(layout: RequestLayout, builder: PromptBuilder) -> None:
    text = SEP.join(["Be kind.", TEXT, "Who writes?"])
    made = layout.completion({"prompt": text, "cacheblend": {"ratio": 0.5}})
    assert made["prompt"] == list(builder.raw(text).token_ids)
    assert made["kv_transfer_params"][PARAMETER]["ratio"] == 0.5
    several = layout.completion({"prompt": [text, "Who writes?"]})
    assert several["prompt"][0] == made["prompt"]
    assert len(several["prompt"]) == 2
    assert "kv_transfer_params" not in several


def test_wishes_are_added_to_those_that_are_there(layout: RequestLayout) -> None:
    given = {"kv_transfer_params": {"x": 1, PARAMETER: {"ratio": 0.1, "save": False}}}
    made = layout.chat({"messages": ASK, "cacheblend": {"ratio": 0.3}, **given})
    assert made["kv_transfer_params"] == {"x": 1, PARAMETER: {"ratio": 0.3, "save": False}}


@pytest.mark.parametrize(
    ("error", "said", "body"),
    [
        (NotFoundError, "rules", {"documents": [{"name": "rule.md"}]}),
        (UsageError, "400", {"documents": [TEXT * 60]}),
        (UsageError, "ratio", {"documents": [TEXT], "cacheblend": {"ratio": 2}}),
        (UsageError, "ratoi", {"cacheblend": {"ratoi": 2}}),
        (UsageError, "object", {"cacheblend": 3}),
        (UsageError, "tools", {"documents": [TEXT], "tools": [{"type": "function"}]}),
        (UsageError, "title", {"documents": [{"title": 3, "text": TEXT}]}),
        (UsageError, "list", {"documents": {"text": TEXT}}),
        (
            UsageError,
            "chat_template_kwargs",
            {"documents": [TEXT], "chat_template_kwargs": {"a": 1}},
        ),
        (
            UsageError,
            "last message",
            {"documents": [TEXT], "messages": [{"role": "system", "content": "x"}]},
        ),
        (
            UsageError,
            "not text",
            {
                "documents": [TEXT],
                "messages": [{"role": "user", "content": [{"type": "image_url"}]}],
            },
        ),
        (
            UsageError,
            "role 'tool'",
            {"documents": [TEXT], "messages": [{"role": "tool", "content": "x"}]},
        ),
        (UsageError, "messages", {"documents": [TEXT], "messages": []}),
        (UsageError, "list", {"documents": ""}),
        (UsageError, "'content'", {"documents": [{"text": TEXT, "content": TEXT}]}),
        (UsageError, "chat_template_kwargs", {"documents": [TEXT], "chat_template_kwargs": 5}),
        (UsageError, "half a character", {"documents": [{"text": TEXT, "source": "\ud800"}]}),
        (
            UsageError,
            "half a character",
            {"kv_transfer_params": {PARAMETER: {"chunks": ["\ud800"]}}},
        ),
        (
            UsageError,
            "twice",
            {"documents": [TEXT], "kv_transfer_params": {PARAMETER: {"chunks": ["a27a"]}}},
        ),
        (UsageError, "object", {"kv_transfer_params": 5}),
        (UsageError, "object", {"kv_transfer_params": {PARAMETER: 5}}),
        (UsageError, "ratio", {"kv_transfer_params": {PARAMETER: {"ratio": 2}}}),
        (UsageError, "'x'", {"kv_transfer_params": {PARAMETER: {"x": 2}}}),
        (UsageError, "chunks", {"kv_transfer_params": {PARAMETER: {"chunks": "a27a"}}}),
        (
            UsageError,
            "exclude",
            {"kv_transfer_params": {PARAMETER: {"chunks": [], "segments": []}}},
        ),
    ],
)
def test_what_is_wrong_is_refused(
    layout: RequestLayout, error: type[CacheblendError], said: str, body: Any
) -> None:
    with pytest.raises(error) as caught:
        layout.chat({"messages": ASK, **body})
    assert said in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK, "documents": ["a " * 1_000_000]},
        {"messages": [{"role": "user", "content": "a " * 1_000_000}], "documents": [TEXT]},
        {"messages": [{"role": "user", "content": SEP.join(["a", "b " * 1_000_000, "c"])}]},
        {"prompt": SEP.join(["a", "b " * 1_000_000, "c"])},
    ],
)
def test_a_text_far_beyond_the_context_is_not_even_encoded(
    layout: RequestLayout, monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    monkeypatch.setattr("engine.tokenizer.Tokenizer.encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(UsageError, match="characters"):
        (layout.chat if "messages" in body else layout.completion)(body)


def asked(layout: RequestLayout, raw: bytes, **scope: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What the application behind the middleware got, None where nothing came, and the answer."""
    got: list[bytes] = []
    sent: list[dict[str, Any]] = []
    waiting = [raw[:7], raw[7:]]

    async def receive() -> dict[str, Any]:
        part = waiting.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(waiting)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        sizes = [v for k, v in scope["headers"] if k == b"content-length"]
        assert sizes in ([], [str(len(body)).encode()])
        got.append(body)

    given = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        **scope,
    }
    asyncio.run(Documents(app, layout)(given, receive, send))
    return (got[0] if got else None), sent


def test_the_middleware_rewrites_only_what_names_documents(layout: RequestLayout) -> None:
    body = json.dumps({"messages": ASK, "documents": [TEXT]}).encode()
    got, sent = asked(layout, body)
    assert "kv_transfer_params" in json.loads(got)
    assert not sent
    assert asked(layout, body, path="/v1/models")[0] == body
    assert asked(layout, body, headers=[(b"content-type", b"text/plain")])[0] == body
    for plain in (b'{"messages": [ ]}', b"not JSON", b"[1, 2]", b"[" * 50_000):
        assert asked(layout, plain)[0] == plain


@pytest.mark.parametrize(
    ("document", "code", "kind"),
    [({"name": "none"}, 404, "NotFoundError"), ({"colour": 1}, 400, "BadRequestError")],
)
def test_the_middleware_answers_for_what_is_wrong(
    layout: RequestLayout, document: Any, code: int, kind: str
) -> None:
    got, sent = asked(layout, json.dumps({"messages": ASK, "documents": [document]}).encode())
    assert got is None
    assert sent[0]["status"] == code
    error = json.loads(sent[1]["body"])["error"]
    assert (error["code"], error["type"]) == (code, kind)
    assert error["message"]
