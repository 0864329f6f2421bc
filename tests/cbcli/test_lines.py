"""What `run` is made of: the reader, what a line may hold, the output file and going on from it."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import UsageError
from cbcli.lines import reader as reader_module
from cbcli.lines.output import EARLIER, OutputFile
from cbcli.lines.prompts import OVERRIDES, BadLine, ChunkOfLine, LineParser, PromptLine
from cbcli.lines.reader import LineReader, RawLine
from cbcli.settings import DECLARED, load_settings


class Slow(io.BytesIO):
    """A stream that gives as many bytes at once as it is told to."""

    def __init__(self, data: bytes, at_once: int) -> None:
        super().__init__(data)
        self.at_once = at_once

    def read1(self, size: int | None = -1, /) -> bytes:
        return super().read1(min(size or 0, self.at_once))


def read(data: bytes, at_once: int = 2**16) -> list[RawLine]:
    return list(all_of(LineReader(Slow(data, at_once))))


def all_of(reader: LineReader) -> Iterator[RawLine]:
    while not reader.ended:
        line = reader.take()
        if line is None:
            reader.fill()
        else:
            yield line


@given(st.lists(st.binary(max_size=9).filter(lambda b: b"\n" not in b)), st.integers(1, 8))
def test_lines_are_those_of_the_data_however_it_comes(parts: list[bytes], at_once: int) -> None:
    data = b"\n".join(parts)
    expected = data.split(b"\n")
    if expected[-1] == b"":
        del expected[-1]  # what ends in a newline ends there
    lines = read(data, at_once)
    assert [line.data for line in lines] == expected
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.parametrize("at_once", [3, 1000])
def test_a_line_that_is_too_long_is_dropped_and_named(monkeypatch, at_once: int) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", 10)
    lines = read(b"short\n" + b"x" * 40 + b"\n" + b"0123456789\n" + b"y" * 11, at_once)
    assert [(line.data, line.too_long) for line in lines] == [
        (b"short", False),
        (b"", True),
        (b"0123456789", False),
        (b"", True),
    ]


def parse(line: str | bytes | dict[str, object], **flags: object) -> PromptLine:
    parsed = parse_any(line, **flags)
    assert isinstance(parsed, PromptLine), parsed
    return parsed


def parse_any(line: object, **flags: object) -> PromptLine | BadLine | None:
    text = json.dumps(line) if isinstance(line, dict) else line
    data = text.encode() if isinstance(text, str) else text
    assert isinstance(data, bytes)
    return LineParser(load_settings(flags)).parse(RawLine(3, data))


def test_questions_and_chunks() -> None:
    line = parse({"id": "a", "question": "Why?"})
    assert (line.name.number, line.name.id, line.question, line.chunks) == (3, "a", "Why?", None)
    line = parse(
        {
            "question": "Why?",
            "chunks": ["one\n", {"text": "two", "source": "b.md"}, {"id": "3f9a"}],
        }
    )
    assert line.name.id is None
    assert line.chunks == (
        ChunkOfLine(text="one\n"),
        ChunkOfLine(text="two", source="b.md"),
        ChunkOfLine(name="3f9a"),
    )
    assert parse({"id": 7, "question": "Why?", "chunks": []}).chunks == ()


def test_prompts_with_separators() -> None:
    line = parse({"prompt": "Be brief. # # one # # two # # Why?"})
    assert line.question == "Why?"
    assert line.chunks == (ChunkOfLine(text="one"), ChunkOfLine(text="two"))
    assert line.overrides == {"system": "Be brief."}
    assert line.notes == ()
    alone = parse({"prompt": "Why?"})
    assert (alone.chunks, alone.overrides) == ((), {})
    assert alone.notes == ("the prompt has no chunks: all of it is computed",)
    line = parse({"prompt": " # # one # # Why?", "system": "Be long."})
    assert line.overrides == {"system": "Be long."}
    assert parse({"prompt": "a\n--\nb\n--\nc"}, text_separator=r"\n--\n").question == "c"


def test_every_override_is_a_setting_and_read_as_one() -> None:
    assert set(OVERRIDES) <= set(DECLARED)
    line = parse({"question": "Why?", "ratio": [0.3, 0.16], "check_layers": [1, 8], "top_k": 2})
    assert line.overrides == {
        "ratio": (Decimal("0.3"), Decimal("0.16")),
        "check_layers": (1, 8),
        "top_k": 2,
    }
    assert parse({"question": "Why?", "stop": "\\n", "seed": None}).overrides == {"stop": ("\\n",)}
    assert parse({"question": "Why?", "ratio": 1}).overrides == {"ratio": (Decimal(1),)}


@pytest.mark.parametrize("blank", [b"", b"  \t", b"\r", b"\xef\xbb\xbf"])
def test_blank_lines_are_none(blank: bytes) -> None:
    assert parse_any(blank) is None


def test_byte_order_mark_and_windows_line_end_are_no_part_of_a_line() -> None:
    plain = parse(b'{"question": "Why?"}')
    assert parse(b'\xef\xbb\xbf{"question": "Why?"}\r') == plain


def test_digests_tell_lines_and_settings_apart() -> None:
    line = {"question": "Why?"}
    same = parse(line).name.digest
    assert parse(line, threads=2, device="cpu").name.digest == same
    others = [
        parse({"question": "Why not?"}).name.digest,
        parse(line, ratio="0.3").name.digest,
        parse(line, model="other").name.digest,
        parse(line, text_separator="--").name.digest,
    ]
    assert len({same, *others}) == 5


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("x", "not JSON: Expecting value at character 1", '{"question": …'),
        ('{"question": "Why?"', "not JSON: Expecting ',' delimiter at character 20", "{"),
        ("[1, 2]", "a list, not a JSON object", "{"),
        ("null", "null, not a JSON object", "{"),
        ('"text"', "a text, not a JSON object", "{"),
        ("[" * 100_000, "not JSON", "{"),
        ('{"question": NaN}', "not JSON: NaN is no JSON number", "{"),
        ('{"seed": ' + "9" * 5000 + "}", "not JSON", "{"),
        ('{"id": 1, "id": 2}', "key 'id' is there twice", "leave out"),
        (b'{"question": "\xff"}', "not UTF-8 text: byte 15", "save the file"),
        ("{}".encode("utf-16"), "not UTF-8 text: byte 1", "save the file"),
        ("{}", "there is no question", "{"),
        ({"question": 3}, "question is a number", "make it a text"),
        ({"question": "  "}, "the question is empty", "{"),
        ({"prompt": ""}, "the prompt is empty", "{"),
        ({"prompt": "a # # b # # "}, "no question after its last separator", "end it"),
        ({"prompt": "a # # b", "question": "c"}, "prompt or question, not both", "{"),
        ({"prompt": "a # # b", "chunks": []}, "prompt or chunks, not both", "{"),
        ({"prompt": "a # # b", "system": "c"}, "instructions of its own", "leave out"),
        ({"question": "q", "id": True}, "id is true", "a text or a whole number"),
        ({"question": "q", "id": 1.5}, "id is a number", "a text or a whole number"),
        ({"question": "q", "id": []}, "id is a list", "a text or a whole number"),
        ({"question": "q", "chunks": "c"}, "chunks is a text", "list"),
        ({"question": "q", "chunks": [3]}, "chunk 1 is a number", "make it a text"),
        ({"question": "q", "chunks": ["c", " "]}, "chunk 2 is empty", "leave it out"),
        ({"question": "q", "chunks": [{}]}, "chunk 1 has nothing", "give either"),
        ({"question": "q", "chunks": [{"text": 1}]}, "text of chunk 1 is a number", "text"),
        ({"question": "q", "chunks": [{"txt": "c"}]}, "unknown key 'txt'", "did you mean text?"),
        ({"question": "q", "chunks": [{"id": "a", "text": "b"}]}, "has id and text", "either"),
        ({"question": "q", "chunks": [{"id": "a", "source": "b"}]}, "id and source", "either"),
        ({"question": "q", "chunk": []}, "unknown key 'chunk'", "did you mean chunks?"),
        ({"question": "q", "rato": 1}, "unknown key 'rato'", "did you mean ratio?"),
        ({"question": "q", "model": "m"}, "unknown key 'model'", ""),
        ({"question": "q", "ratio": 1.5}, "ratio is 1.5", "numbers from 0 to 1"),
        ({"question": "q", "ratio": "lots"}, "ratio is 'lots'", "numbers from 0 to 1"),
        ({"question": "q", "mode": "fast"}, "mode is 'fast'", "one of blend"),
        ({"question": "q", "check_layers": 0}, "check_layers is 0", "noise"),
        ({"question": "q", "max_tokens": 0}, "max_tokens is 0", "whole number"),
        ({"question": "q", "system": 1}, "system is 1", "text"),
        ({"question": "q", "stop": [""]}, "stop is ['']", "list of texts"),
    ],
)
def test_what_is_no_prompt_says_why(line: object, message: str, hint: str) -> None:
    bad = parse_any(line)
    assert isinstance(bad, BadLine)
    assert isinstance(bad.error, UsageError)
    assert message in bad.error.message
    assert hint in bad.error.hint


def test_a_bad_line_keeps_its_id() -> None:
    bad = parse_any({"id": "x", "question": ""})
    assert isinstance(bad, BadLine)
    assert bad.name.id == "x"


# The output file.


def line_of(number: int, digest: str, *, failed: bool = False) -> str:
    body = {"error": {"kind": "usage"}} if failed else {"answer": f"answer {number}"}
    return json.dumps({"id": None, "line": number, "input": digest, **body}) + "\n"


def numbers(path: Path) -> list[int]:
    return [json.loads(text)["line"] for text in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_lines_are_there_as_soon_as_they_are_written(path: Path) -> None:
    with OutputFile(path) as output:
        output.write(1, line_of(1, "a"))
        assert numbers(path) == [1]
        output.write(2, line_of(2, "b"))
        assert numbers(path) == [1, 2]


def test_a_file_that_is_there_is_not_written_over(path: Path) -> None:
    written(path, line_of(1, "a"))
    with pytest.raises(UsageError, match="is there already") as caught:
        OutputFile(path)
    assert "--resume" in caught.value.hint
    assert numbers(path) == [1]


@pytest.mark.parametrize(
    "foreign",
    ["notes\n", "notes", "{}\n", '{"id": 1}\n', '{"id": 1, "question": "Why?"}', "\n"],
)
def test_what_no_run_wrote_is_left_alone(path: Path, foreign: str) -> None:
    written(path, foreign)
    with pytest.raises(UsageError, match="something else"):
        OutputFile(path, resume=True)
    assert path.read_text() == foreign


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a file"):
        OutputFile(tmp_path)


def test_two_runs_do_not_write_one_file(path: Path) -> None:
    with OutputFile(path), pytest.raises(UsageError, match="another run"):
        OutputFile(path, resume=True)


def go_on(path: Path, inputs: dict[int, str], *, stop_after: int = 99) -> list[int]:
    """Resumes over lines of input, by number and digest; the lines that were run again. It stops
    short, as an interrupt does, before line `stop_after`."""
    again = []
    with OutputFile(path, resume=True) as output:
        for number, digest in inputs.items():
            if number > stop_after:
                return again
            kept = output.kept(number, digest)
            if not kept:
                again.append(number)
            output.write(number, kept or line_of(number, digest))
        output.finish()
    return again


FIVE = {1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}


def test_going_on_does_what_is_missing_failed_or_changed(path: Path) -> None:
    assert go_on(path, FIVE) == [1, 2, 3, 4, 5]  # nothing was there
    whole = path.read_text()
    assert go_on(path, FIVE) == []
    assert path.read_text() == whole
    written(path, *[line_of(n, d, failed=n == 2) for n, d in FIVE.items() if n != 4])
    assert go_on(path, FIVE) == [2, 4]
    assert path.read_text() == whole
    assert go_on(path, {**FIVE, 3: "other", 6: "f"}) == [3, 6]
    assert numbers(path) == [1, 2, 3, 4, 5, 6]
    assert go_on(path, {1: "a", 2: "b"}) == []  # the input is shorter now
    assert numbers(path) == [1, 2]
    assert list(path.parent.iterdir()) == [path]


def test_a_line_cut_short_is_done_again(path: Path) -> None:
    lines = [line_of(n, d) for n, d in FIVE.items()]
    for cut in (1, 9, len(lines[4]) - 1):
        written(path, *lines[:4], lines[4][:cut])
        assert go_on(path, FIVE) == [5]
        assert path.read_text() == "".join(lines)
    for cut in (1, 5, 30):  # the very first one
        written(path, lines[0][:cut])
        assert go_on(path, FIVE) == [1, 2, 3, 4, 5]
    written(path, *lines[:2], "\0" * 10, "\n", *lines[3:])
    assert go_on(path, FIVE) == [3]


def test_stopping_while_going_on_loses_nothing(path: Path) -> None:
    written(path, *[line_of(n, d) for n, d in FIVE.items() if n != 2])
    assert go_on(path, FIVE, stop_after=3) == [2]
    assert numbers(path) == [1, 2, 3, 4, 5]
    assert list(path.parent.iterdir()) == [path]
    assert go_on(path, FIVE) == []


def test_what_was_taken_but_not_written_comes_back(path: Path) -> None:
    """Several workers: later lines are looked up while an earlier one is still at work."""
    written(path, *[line_of(n, d) for n, d in FIVE.items() if n != 2])
    with OutputFile(path, resume=True) as output:
        for number in range(1, 5):
            output.kept(number, FIVE[number])
        output.write(1, line_of(1, "a"))
    assert numbers(path) == [1, 3, 4, 5]


@pytest.mark.parametrize("written_before", [0, 2, 4])
def test_a_crash_while_going_on_loses_nothing(path: Path, written_before: int) -> None:
    written(path, *[line_of(n, d) for n, d in FIVE.items() if n != 2])
    output = OutputFile(path, resume=True)
    for number in range(1, written_before + 1):
        output.write(number, output.kept(number, FIVE[number]) or line_of(number, FIVE[number]))
    output._file.close()  # as the system does it when the process is killed
    assert path.with_name(path.name + EARLIER).exists()
    with pytest.raises(UsageError, match="is there already"):
        OutputFile(path)
    assert go_on(path, FIVE) == ([] if written_before >= 2 else [2])
    assert numbers(path) == [1, 2, 3, 4, 5]
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_no_half_line(path: Path, monkeypatch) -> None:
    with OutputFile(path) as output:
        output.write(1, line_of(1, "a"))
        file = output._file

        class Full:
            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

            def write(self, data: bytes) -> int:
                if len(data) < 20:
                    raise OSError(28, os.strerror(28))
                return file.write(data[:20])

        monkeypatch.setattr(output, "_file", Full())
        with pytest.raises(OSError, match="No space"):
            output.write(2, line_of(2, "b")[:30])
        monkeypatch.setattr(output, "_file", file)
    assert path.read_text() == line_of(1, "a")
