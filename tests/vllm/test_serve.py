"""`cacheblend serve` on a real vLLM, asked by OpenAI's own client."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_store.catalog import ChunkInfo
from cache_store.store import ChunkStore
from engine.audit import AuditLog
from tests.cbcli.world import CHATML, TEXTS
from tests.engine.tiny_models import build
from tests.engine.tiny_tokenizers import write_tokenizer
from tests.vllm.serving import START_SECONDS, Server, cacheblend, launch, start
from tests.vllm.worlds import TINY

SEPARATOR = " # # "
KEY = "tell-nobody"
ASK = [{"role": "user", "content": "Who keeps the log of every boat?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model called `tiny`, and a store with three documents that the torch engine ingested."""
    root = tmp_path_factory.mktemp("serve")
    model = root / "models" / "tiny"
    build(TINY["llama"], model, 0)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_tokenizer(model, chat_template=CHATML, config=config)
    for name, text in TEXTS.items():
        path = root / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ingest(root, root / "docs")
    return root


def chunks_of(home: Path, name: str) -> list[ChunkInfo]:
    with ChunkStore.open(home / "store", read_only=True) as store:
        return [c for c in store.catalog.chunks() if c.source.endswith(f"/{name}")]


def ingest(home: Path, path: Path) -> Any:
    flags = ("--model", "tiny", "--dtype", "fp32", "--chunk-tokens", "48")
    return cacheblend(home, "ingest", str(path), *flags)


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    served = start(
        home,
        "tiny",
        home / "log.txt",
        *("--dtype", "fp32", "--min-tokens", "0", "--policy", "value", "--audit", "2"),
        *("--", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
        *("--api-key", KEY),
    )
    served.headers = {"Authorization": f"Bearer {KEY}"}
    yield served
    served.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def chat(client: Any, documents: list[Any] | None = None, **options: Any) -> Any:
    """A chat completion; `cacheblend` and the like go as the client's extra body."""
    extra = {"cacheblend": options.pop("cacheblend")} if "cacheblend" in options else {}
    if documents is not None:
        extra["documents"] = documents
    given = {"messages": ASK, **OPTIONS, **options}
    return client.chat.completions.create(**given, extra_body=extra)


def report(answer: Any) -> dict[str, Any]:
    """What was done for a request."""
    found: dict[str, Any] = answer.model_dump()["kv_transfer_params"]["cacheblend"]
    return found


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_says_where_it_answers(server: Server, home: Path) -> None:
    ready = server.ready
    assert ready["model"] == "tiny"
    assert ready["store"] == str(home / "store")
    assert ready["blending"] is True
    assert ready["host"] == "127.0.0.1"
    assert server.get("/health") == ""
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "tiny"


def test_documents_by_name_id_and_text_are_the_same_prompt(client: Any, home: Path) -> None:
    one = chunks_of(home, "one.md")
    assert len(one) > 1
    forms: list[list[Any]] = [
        [{"name": "one.md"}],
        [{"source": str(home / "docs/one.md")}],
        [{"id": chunk.chunk_id[:16]} for chunk in one],
        [{"text": chunk.text} for chunk in one],
        [{"content": chunk.text} for chunk in one],
        [chunk.text for chunk in one],
    ]
    answers = [chat(client, form) for form in forms]
    assert len({answer.usage.prompt_tokens for answer in answers}) == 1
    assert len({text(answer) for answer in answers}) == 1
    first = report(answers[0])
    assert first["status"] == "blended"
    assert first["chunk_tokens"]["miss"] == 0
    assert first["chunk_tokens"]["cached"] > 0


def test_texts_that_are_new_are_stored_after_the_answer(client: Any, server: Server) -> None:
    first, second = "A new rope is stiff. " * 6, "The tar is boiled in an iron pot. " * 5
    saved = server.metric("saved_chunks_total")
    before = chat(client, [first, {"text": second, "title": "Tar"}])
    assert report(before)["chunk_tokens"]["cached"] == 0
    assert report(before)["saving"] == 2
    server.wait_for("saved_chunks_total", saved + 2)
    after = report(chat(client, [f"Tar\n\n{second}", first]))
    assert after["status"] == "blended"
    assert after["chunk_tokens"]["miss"] == 0


def test_a_document_that_another_process_ingests_meanwhile_hits(client: Any, home: Path) -> None:
    path = home / "later.md"
    path.write_text("The ferry does not run in March. Its crew paints the hull. " * 3)
    ingest(home, path)
    found = report(chat(client, [{"name": "later.md"}, {"name": "two.txt"}]))
    assert found["status"] == "blended"
    assert found["chunk_tokens"]["miss"] == 0


def test_what_the_server_stored_hits_in_another_process(
    client: Any, server: Server, home: Path
) -> None:
    new = "Nobody has ever seen the pilot without his coat. " * 4
    saved = server.metric("saved_chunks_total")
    chat(client, [new])
    server.wait_for("saved_chunks_total", saved + 1)
    lines = home / "prompts.jsonl"
    lines.write_text(json.dumps({"question": "Who?", "chunks": [new]}) + "\n")
    flags = ("--model", "tiny", "--dtype", "fp32", "--max-tokens", "2", "--min-tokens", "0")
    answered = cacheblend(home, "run", str(lines), *flags)
    chunk = next(s for s in answered["prompt"]["segments"] if s["kind"] == "chunk")
    assert chunk["status"] in ("exact", "hit")


def test_streaming_gives_the_same_text(client: Any) -> None:
    documents = [{"name": "two.txt"}, {"name": "one.md"}]
    whole = chat(client, documents)
    usage = {"stream_options": {"include_usage": True}}
    pieces = list(chat(client, documents, stream=True, **usage))
    said = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert said == text(whole)
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_log_probabilities_and_stop_are_vllms(client: Any) -> None:
    documents = [{"name": "one.md"}]
    answer = chat(client, documents, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == OPTIONS["max_tokens"]
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    assert answer.choices[0].finish_reason == "length"
    word = text(answer)[len(text(answer)) // 2 :][:1]
    stopped = chat(client, documents, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert word not in text(stopped)


def test_a_system_prompt_of_the_request_is_in_the_prompt(client: Any) -> None:
    system = {"role": "system", "content": "You are the harbour master's parrot. Be loud."}
    plain = chat(client, [{"name": "one.md"}])
    other = chat(client, [{"name": "one.md"}], messages=[system, *ASK])
    assert plain.usage.prompt_tokens != other.usage.prompt_tokens
    assert report(other)["chunk_tokens"]["miss"] == 0  # the chunks are those of another prefix


def test_earlier_turns_stand_in_front_of_the_question(client: Any) -> None:
    turns = [
        {"role": "user", "content": "When does the pilot boat leave?"},
        {"role": "assistant", "content": "At six."},
        *ASK,
    ]
    short = chat(client, [{"name": "one.md"}])
    long = chat(client, [{"name": "one.md"}], messages=turns)
    assert long.usage.prompt_tokens > short.usage.prompt_tokens
    assert report(long)["chunk_tokens"] == report(short)["chunk_tokens"]


def test_separators_in_a_message_name_chunks(client: Any) -> None:
    texts = [text for name, text in TEXTS.items() if name != "one.md"]
    question = ASK[0]["content"]
    by_documents = chat(client, texts)
    message = SEPARATOR.join(["", *texts, question]).removeprefix(" ")
    by_separators = chat(client, messages=[{"role": "user", "content": message}])
    assert by_separators.usage.prompt_tokens == by_documents.usage.prompt_tokens
    assert text(by_separators) == text(by_documents)


def test_separators_in_a_completion_name_chunks(client: Any, home: Path) -> None:
    chunks = [chunk.text for chunk in chunks_of(home, "one.md")]
    prompt = SEPARATOR.join(["Read this.", *chunks, "Who is Orla?"])
    answer = client.completions.create(prompt=prompt, **OPTIONS)
    assert report(answer)["chunk_tokens"]["miss"] == 0
    assert report(answer)["chunk_tokens"]["cached"] > 0
    two = client.completions.create(prompt=[prompt, "Who is Orla?"], **OPTIONS)
    assert two.choices[0].text == answer.choices[0].text
    assert len(two.choices) == 2


def test_plain_requests_are_left_alone(client: Any, server: Server) -> None:
    before = server.metric("requests_total", outcome="plain")
    answer = chat(client)
    assert answer.model_dump()["kv_transfer_params"] is None
    done = client.completions.create(prompt="One # # separator is no chunk", **OPTIONS)
    assert done.model_dump()["kv_transfer_params"] is None
    server.wait_for("requests_total", before + 2, outcome="plain")


def test_a_request_may_say_how_it_is_blended(client: Any) -> None:
    documents = [{"name": "one.md"}, {"name": "two.txt"}]
    few = report(chat(client, documents, cacheblend={"ratio": 0.05}))
    many = report(chat(client, documents, cacheblend={"ratio": [0.6], "policy": "key"}))
    assert (few["ratios"], few["policy"]) == ([0.05], "value")
    assert (many["ratios"], many["policy"]) == ([0.6], "key")
    assert few["recomputed"]["tokens"] < many["recomputed"]["tokens"]
    full = chat(client, documents, cacheblend={"mode": "full"}).model_dump()
    assert full["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("documents", "options", "code", "said"),
    [
        ([{"id": "beefbeef"}], {}, 404, "beefbeef"),
        ([{"name": "one.mdd"}], {}, 404, "one.md"),
        ([{"id": "3f"}], {}, 400, "3f"),
        ([{"colour": "red"}], {}, 400, "colour"),
        ([7], {}, 400, "document 1"),
        ("one.md", {}, 400, "documents"),
        ([""], {}, 400, "empty"),
        (["x " * 1500], {}, 400, "tokens"),
        (["x"], {"cacheblend": {"ratio": 1.5}}, 400, "1.5"),
        (["x"], {"cacheblend": {"ration": 0.5}}, 400, "ratio"),
        (["x"], {"cacheblend": [1]}, 400, "cacheblend"),
        (None, {"cacheblend": {"policy": "best"}}, 400, "best"),
        (["x"], {"messages": [{"role": "assistant", "content": "Hm."}]}, 400, "question"),
        (["x"], {"messages": [{"role": "user", "content": ""}]}, 400, "empty"),
        (["x"], {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ],
)
def test_what_is_wrong_is_told_and_reaches_no_engine(
    client: Any, documents: Any, options: dict[str, Any], code: int, said: str
) -> None:
    from openai import APIStatusError

    for stream in (False, True):
        with pytest.raises(APIStatusError) as caught:
            chat(client, documents, stream=stream, **options)
        assert caught.value.status_code == code
        assert said in caught.value.message
        assert caught.value.body["code"] == code  # type: ignore[index]


def test_who_is_not_let_in_learns_nothing_of_the_store(client: Any) -> None:
    from openai import AuthenticationError

    stranger = client.with_options(api_key="wrong")
    for documents in ([{"name": "one.md"}], [{"name": "none.md"}]):
        with pytest.raises(AuthenticationError):
            chat(stranger, documents)


def test_documents_of_a_completion_are_refused(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="chat/completions"):
        client.completions.create(prompt="x", extra_body={"documents": ["y"]}, **OPTIONS)


def test_metrics_rise_with_what_is_done(client: Any, server: Server) -> None:
    names = [("requests_total", "outcome", "blended"), ("recomputed_tokens_total", "engine", "0")]
    names += [("seconds_total", "part", "total"), ("loaded_bytes_total", "tier", "disk")]
    names += [("blend_seconds_count", "engine", "0")]
    before = [server.metric(name, **{label: value}) for name, label, value in names]
    new = "What stands in front of the others was never there before."  # so that none is held
    done = report(chat(client, [new, {"name": "two.txt"}, {"name": "one.md"}]))
    server.wait_for("requests_total", before[0] + 1, outcome="blended")
    after = [server.metric(name, **{label: value}) for name, label, value in names]
    rises = [round(b - a, 6) for a, b in zip(before, after, strict=True)]
    assert rises[0] == rises[4] == 1
    assert rises[1] == done["recomputed"]["tokens"] > 0
    assert rises[2] == pytest.approx(done["seconds"]["total"], abs=1e-5)
    assert rises[3] == done["bytes"]["disk"] > 0


def test_tells_of_itself(server: Server, home: Path) -> None:
    told = json.loads(server.get("/v1/cacheblend"))
    assert told["blending"] == {"on": True, "why": None}
    assert told["store"]["path"] == str(home / "store")
    assert told["store"]["documents"] >= len(TEXTS)
    assert told["settings"]["policy"] == "value"
    assert told["model"]["name"] == "tiny"


def test_one_in_two_blended_answers_is_audited(client: Any, server: Server, home: Path) -> None:
    """As `--audit 2` asks for; the log is the one that the torch engine writes."""
    audited = server.metric("audit_kl_count")
    for number in range(2):
        new = f"This is text {number} that was never in front of the others. "
        done = report(chat(client, [new, {"name": "two.txt"}, {"name": "one.md"}]))
        assert done["status"] == "blended"
    server.wait_for("audit_kl_count", audited + 1)
    assert server.metric("failures_total", what="audit") == 0
    with ChunkStore.open(home / "store", read_only=True) as store:
        records, damaged = AuditLog(store.journal).records()
    assert damaged == 0
    assert records[-1].policy == "value"
    assert records[-1].cached_tokens > records[-1].recomputed > 0
    assert 0 <= records[-1].kl_mean < 1


def test_what_cannot_be_blended_with_is_told_in_a_line(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    flags = ("--port", "0", "--json", "--pipeline-parallel-size", "2")
    process = launch(home, log, "tiny", *flags)
    assert process.wait(timeout=START_SECONDS) == 2
    *_, last = log.read_text().splitlines()
    assert "pipeline parallel" in json.loads(last)["error"]["message"]
    assert "Traceback" not in log.read_text()


def test_ctrl_c_while_it_starts_ends_it_at_once(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = launch(home, log, "tiny", "--port", "0")
    until = time.monotonic() + START_SECONDS
    while "starting vLLM" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=START_SECONDS) == 130
    assert log.read_text().splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in log.read_text()


def test_ctrl_c_ends_it_in_good_order(server: Server) -> None:
    """The last test: nothing answers after it."""
    assert server.end(signal.SIGINT) == 0
    text = server.log.read_text()
    assert "Traceback" not in text
    assert "error" not in text.lower().splitlines()[-1]
