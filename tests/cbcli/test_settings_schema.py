"""The schema of settings files agrees with what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli

from cbcli.declared import DECLARED
from cbcli.settings_schema import settings_schema
from cbcli.settings_text import template
from tests.cbcli.terminal import run

COPY = Path(__file__).parents[2] / "docs" / "reference" / "schemas" / "config.json"
SCHEMA = settings_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

VALUES: list[Any] = [
    *(-1, 0, 1, 5, 512, 65536, 2**70, 0.16, 1.5, 101.5, True, False, "", " ", "auto", "none"),
    *(
        "text",
        "given",
        "cpu",
        "cuda:0",
        "cuda:0,cpu",
        "cuda:x",
        "tpu",
        "bf16",
        "int4",
        "torch",
        "prefix",
    ),
    *("20GB", "20XB", "0", "1", "1,8", "0.3,0.16", "2,x", "2026-01-31", "31.1.2026", "blend"),
    *("question:layers=8-20", "quest", "bm25", "mine.py:find", "redis://h:1/0", "file:///x"),
    *("work", "two words", "a,b", "a, b", "qa", "full", "sync", "--", "mod:2x", "x" * 81),
    *([], [1, 8], [0.3, 0.16], ["a"], ["a", "b c"], [""], [True], {}, {"a": 1}, ["cuda:0", "cpu"]),
]


def test_the_schema_is_one_and_the_copy_in_the_docs_is_current() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    printed = run("config", "schema")
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == SCHEMA
    assert json.loads(run("config", "schema", "--json").stdout) == SCHEMA
    text = COPY.read_text("utf-8")
    assert text == printed.stdout, "cacheblend config schema > docs/reference/schemas/config.json"


def test_the_template_is_good_with_all_of_it_uncommented() -> None:
    lines = [
        line.removeprefix("# ")
        for line in template().splitlines()
        if " = " in line or line.startswith("# [")
    ]
    found = tomli.loads("\n".join(lines))
    assert set(found) == set(DECLARED)
    VALIDATOR.validate(found)
    VALIDATOR.validate({})
    VALIDATOR.validate({"profile": "fast"})


@pytest.mark.parametrize("name", DECLARED)
def test_what_the_schema_takes_the_settings_take(name: str) -> None:
    kind, taken = DECLARED[name].kind, 0
    for value in VALUES:
        if not VALIDATOR.is_valid({name: value}):
            continue
        taken += 1
        if name == "profile" and value == {}:
            continue
        said = ""
        try:
            kind(value)
        except ValueError as error:
            said = str(error)
        # What only a reader can tell: an address that leads nowhere, a list that must rise.
        beyond = name == "remote" or said.startswith(("layers in rising", "auto, or"))
        assert beyond or not said, value
    assert 0 < taken < len(VALUES) * 3 // 4
    described = SCHEMA["properties"][name]
    if "default" in described:
        assert VALIDATOR.is_valid({name: described["default"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"topk": 3},
        {"top_k": 0},
        {"top_k": "many"},
        {"ratio": 1.5},
        {"policy": "quest"},
        {"stop": [1]},
        {"profile": {"fast": {"rato": 1}}},
        {"profile": {"fast": {"ratio": 7}}},
        {"profile": {"fast": 3}},
        {"profile": {"use": 3}},
        {"profile": {"a": {"profile": "b"}}},
    ],
)
def test_what_is_wrong_is_refused(wrong: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(wrong)
