"""What every command prints with --json is what its documented schema says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from cbcli.commands import serve
from cbcli.output import Output
from cbcli.settings import load_settings
from engine import diskprobe
from engine import probe as probing
from engine.bench import conditions
from engine.calibration.outcome import GateCheck
from tests.cbcli import schemas
from tests.cbcli.world import make_world

QUESTION = "Who keeps the log of every boat?"
SHORT = ("--tokens", "64", "--pairs", "1")
LINES = [
    {"id": "a", "question": QUESTION, "chunks": ["The harbour master is Orla. She keeps the log."]},
    {"question": 5},
]
ASKED = [{"id": "q", **LINES[0], "answers": ["Orla"]}]  # type: ignore[dict-item]
TALK = f"{QUESTION}\n/chunks\n/help\n"  # what chat reads

# Commands in the order they are run in one world; {…} stands for what an earlier one printed.
STEPS: Sequence[tuple[str, ...]] = (
    ("ingest", "docs", "--chunk-tokens", "24", "--collection", "sea", "--collection", "bay"),
    ("ingest", "docs", "--dry-run"),
    ("ingest", "--type-list"),
    ("ask", QUESTION, "--compare", "--audit", "1", "--ratio", "0.3", "--trace-level", "full"),
    ("ask", QUESTION, "--cite"),
    ("chat",),
    ("search", QUESTION, "--with-neighbours", "1"),
    ("run", "lines.jsonl"),
    ("run", "lines.jsonl", "--output", "answers.jsonl"),
    ("inspect",),
    ("inspect", "--last", "2"),
    ("store", "ls"),
    ("store", "ls", "--documents"),
    ("store", "show", "{chunk}", "--tokens"),
    ("store", "stats"),
    ("store", "path"),
    ("store", "limit", "400MB"),
    ("store", "pin", "--all"),
    ("store", "unpin", "--all"),
    ("store", "collections"),
    ("store", "collections", "add", "land", "{source}"),
    ("store", "collections", "remove", "land", "{source}"),
    ("store", "collections", "rm", "sea"),
    ("store", "export", "all.tar"),
    ("store", "import", "all.tar", "--store", "other"),
    ("store", "push", "--all", "--remote", "file://{root}/shared"),
    ("store", "warm", "{chunk}"),
    ("store", "verify"),
    ("store", "prune", "--unused-for", "30d", "--dry-run"),
    ("store", "rm", "{chunk}"),
    ("store", "estimate", "docs"),
    ("eval", "asked.jsonl", "--ratios", "0,1", "--policies", "value", "-n", "2", "--tokens", "2"),
    ("calibrate", "--gate-only"),
    ("bench", "ttft", *SHORT, "--ratios", "0.3", "--policies", "value"),
    ("bench", "ingest", "--lengths", "32", *SHORT),
    ("bench", "load", *SHORT, "--loaders", "sync", "--bandwidth", "unlimited"),
    ("bench", "decode", *SHORT, "--output", "2"),
    ("models", "pull", "home/models/tiny", "--name", "copy"),
    ("models", "ls"),
    ("models", "show", "copy"),
    ("models", "check", "copy"),
    ("models", "rm", "copy", "--yes"),
    ("config", "show"),
    ("config", "schema"),
    ("config", "path"),
    ("config", "init"),
    ("config", "validate"),
    ("doctor",),
)
LISTS = [
    ("ingest", "docs", "--dry-run"),
    ("search", QUESTION),
    ("store", "ls"),
    ("store", "ls", "--documents"),
    ("store", "collections"),
    ("models", "ls"),
]
# Driven where they can be: serve needs vLLM, the device table a calibration.
ELSEWHERE = {"serve", "calibrate-device-table"}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """By schema, the documents that commands print in one world."""
    found: dict[str, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("world"), patch)
        quick(patch)
        for name, lines in (("lines", LINES), ("asked", ASKED)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (world.root / f"{name}.jsonl").write_text(text)
        (world.root / "shared").mkdir()
        known = {"root": str(world.root)}
        for step in STEPS:
            args = [word.format(**known) for word in step]
            result = world(*args, "--json", input=TALK)
            assert result.exit_code in (0, 1), f"{args}: {result.stderr}"
            documents = [json.loads(line) for line in result.stdout.splitlines()]
            assert documents, args
            found.setdefault(schemas.schema_name(args), []).extend(documents)
            if args == ["store", "ls"]:
                chunk = documents[0]["chunks"][0]
                known |= {"chunk": chunk["chunk_id"], "source": chunk["source"]}
        for step in LISTS:
            text = world(*step, "--jsonl").stdout
            found[f"{schemas.schema_name(step)} lines"] = [
                json.loads(one) for one in text.splitlines()
            ]
        found["error"] = [json.loads(world("store", "show", "beef", "--json").stderr)]
        (world.docs / "bad.txt").write_bytes(b"\xff\xfe\x00")
        hurt = world("ingest", "docs", "--json").stderr.splitlines()
        found["warning"] = [json.loads(line) for line in hurt if "warning" in line]
        yield found


def quick(patch: pytest.MonkeyPatch) -> None:
    """What is measured here is measured once, and the gate is given."""

    @contextmanager
    def ground(engine: Any) -> Iterator[Any]:
        yield SimpleNamespace(engine=engine)

    patch.setattr(probing, "ENOUGH", 0.0)
    patch.setattr(probing, "FEWEST", 1)
    patch.setattr(diskprobe, "FILES", 2)
    patch.setattr(conditions, "_busy_cores", lambda seconds: 0.0)
    patch.setattr("engine.calibration.ground.ground", ground)
    check = GateCheck("one", 0.1, 0.2, "said")
    patch.setattr("engine.calibration.gate.gate_checks", lambda where: iter([check]))


@pytest.mark.parametrize("words", list(schemas.commands()), ids=" ".join)
def test_every_command_has_json_and_a_schema(words: tuple[str, ...]) -> None:
    options = {opt for parameter in schemas.commands()[words].params for opt in parameter.opts}
    assert {"--json", "--quiet", "--verbose"} <= options
    assert "-".join(words) in schemas.names()
    if "--jsonl" in options:
        assert "--fields" in options


def test_every_schema_is_of_a_command() -> None:
    known = {"-".join(words) for words in schemas.commands()} | set(schemas.VARIANTS.values())
    assert set(schemas.names()) == known | set(schemas.BESIDE) | {schemas.RECORDS}


@pytest.mark.parametrize("name", schemas.names())
def test_schemas_are_good_strict_and_have_examples(name: str) -> None:
    schema = schemas.schema(name)
    Draft202012Validator.check_schema(schema)
    assert not list(loose(schema, name == schemas.RECORDS))
    if name != schemas.RECORDS:
        assert schema["examples"]
        for example in schema["examples"]:
            schemas.check(name, example)


def loose(schema: Any, records: bool, place: str = "$") -> Iterator[str]:
    """Where a schema says nothing of fields that it doesn't name. A record that others add fields
    to is closed by those who use it."""
    if isinstance(schema, dict):
        closed = {"additionalProperties", "unevaluatedProperties"} & set(schema)
        if "properties" in schema and not closed and not (records and place.count(".") == 2):
            yield place
        for key, value in schema.items():
            if key != "examples":
                yield from loose(value, records, f"{place}.{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from loose(value, records, f"{place}[{number}]")


def test_every_schema_is_compared_with_what_is_printed(printed: dict[str, list[Any]]) -> None:
    driven = {name.removesuffix(" lines") for name in printed}
    assert driven | ELSEWHERE | {schemas.RECORDS, "progress"} == set(schemas.names())


def test_what_is_printed_is_as_documented(printed: dict[str, list[Any]]) -> None:
    for name, documents in printed.items():
        assert documents, name
        for document in documents:
            part = "line" if name.endswith(" lines") else ""
            schemas.check(name.removesuffix(" lines"), document, part)


def test_a_field_too_much_or_too_few_is_found(printed: dict[str, list[Any]]) -> None:
    """Of every document, and of every record in it."""
    for name, documents in printed.items():
        part = "line" if name.endswith(" lines") else ""
        document = documents[0]
        if name in ("config-show", "config-schema") or not isinstance(document, dict):
            continue
        for wrong in ({**document, "zzz": 1}, dict(list(document.items())[1:])):
            with pytest.raises(AssertionError):
                schemas.check(name.removesuffix(" lines"), wrong, part)


def test_a_chunk_is_the_same_record_everywhere(printed: dict[str, list[Any]]) -> None:
    fields = set(schemas.schema("records")["$defs"]["position"]["required"])
    fields |= set(schemas.schema("records")["$defs"]["chunk"]["required"])
    for name in ("ingest-dry-run lines", "search lines", "store-ls lines", "store-show"):
        for record in printed[name]:
            assert fields <= set(record), name


def test_serve_says_where_it_answers_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    plan: Any = SimpleNamespace(connector={"store": "/store"})
    for off in (None, "the gate failed"):
        ready: Any = SimpleNamespace(host="::1", port=80, name="m", vllm="0.32.0", off=off)
        serve._say_ready(Output(json=True), load_settings(env={}), plan, ready)
        document = json.loads(capsys.readouterr().out)
        schemas.check("serve", document)
        assert (document["url"], document["blending"]) == ("http://[::1]:80", off is None)
