"""Every value is there, under its path."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.documents.formats.json_values import lines, parse
from tests.engine.documents.reading import at_marks, document

BOATS = [
    {"name": "Petrel", "crew": ["Orla", "Finn"], "built": {"year": 1987, "place": "Kiel"}},
    {"name": "Gannet", "crew": [], "log": [{"day": 1, "text": "calm"}, {"day": 2, "text": "gale"}]},
]


def test_a_list_of_records(tmp_path: Path) -> None:
    found = document(tmp_path, "boats.json", json.dumps(BOATS, indent=2))
    assert (found.kind, found.form) == ("json", "text")
    first = "name: Petrel\ncrew: Orla, Finn\nbuilt.year: 1987\nbuilt.place: Kiel"
    second = (
        "name: Gannet\ncrew: []\nlog[0].day: 1\nlog[0].text: calm\nlog[1].day: 2\nlog[1].text: gale"
    )
    assert found.text == f"{first}\n\n{second}\n"
    assert at_marks(found) == {("record", 1): first, ("record", 2): second}


def test_json_lines(tmp_path: Path) -> None:
    raw = '{"a": "x\\u2028y"}\n\n{"a": 2}\n{broken\n"text"\n'
    found = document(tmp_path, "log.jsonl", raw)
    assert found.kind == "jsonl"
    assert at_marks(found) == {
        ("line", 1): "a: x\u2028y",
        ("line", 3): "a: 2",
        ("line", 4): "{broken",
        ("line", 5): "text",
    }
    assert found.notes == ("line 4 is not valid JSON: kept as text",)


def test_json_lines_under_the_name_of_json(tmp_path: Path) -> None:
    assert document(tmp_path, "a.json", '{"a": 1}\n{"a": 2}\n').kind == "jsonl"


def test_numbers_stay_as_they_are_written(tmp_path: Path) -> None:
    digits = "1" * 5000
    raw = f'{{"a": 1.10, "a": 1e400, "b": "1.10", "c": "null", "d": null, "e": "", "f": {digits}}}'
    found = document(tmp_path, "n.json", raw)
    assert found.text == (f'a: 1.10\na: 1e400\nb: "1.10"\nc: "null"\nd: null\ne: ""\nf: {digits}\n')


@pytest.mark.parametrize("raw", ['{"a": ', "[1, 2,]", "{'a': 1}", "{" * 5 + '"', "[" * 100_000])
def test_broken_json_is_text_and_told(tmp_path: Path, raw: str) -> None:
    found = document(tmp_path, "b.json", raw)
    assert found.text == raw
    assert "not valid JSON" in found.notes[0]


def test_escapes_that_are_no_text(tmp_path: Path) -> None:
    found = document(tmp_path, "e.json", '{"a": "\\ud800 \\u0000 \\r\\n\\r.", "b": "c"}')
    assert found.text == "a: \ufffd \ufffd \n\n.\nb: c\n"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in _texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


@settings(max_examples=50)
@given(_VALUES)
def test_no_text_is_lost(value: object) -> None:
    written = "\n".join(lines(parse(json.dumps(value))))
    for text in _texts(value):
        assert text in written or json.dumps(text, ensure_ascii=False) in written


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_names_that_would_be_repeated_without_end(tmp_path: Path, name: str) -> None:
    raw = json.dumps({"k" * 100_000: [{"a": 1}] * 100_000})
    found = document(tmp_path, name, raw)
    assert found.text.strip() == raw
    assert "read as text" in found.notes[0]
