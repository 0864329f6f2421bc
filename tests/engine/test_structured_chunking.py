"""Chunks of Markdown, tables and code end where their structure does."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.catalog import Place
from engine.chunking import Chunk, Cutting, markdown
from engine.chunking.outline import CODE, HEADING, ITEM, NONE, QUOTE, TABLE
from engine.documents import Document, Mark
from engine.tokenizer import Tokenizer
from tests.engine.cut_texts import split_document
from tests.engine.tiny_tokenizers import write_tokenizer

FORMS = ("markdown", "rows", "code:python", "code:c")
PIECES = [
    *["# Gate\n\n", "## Keys\n", "Title\n===\n", "- item\n", "  more of it\n", "1. one\n", "\n"],
    *["```py\nx = 1\n\ny = 2\n```\n", "~~~\n", "| a | b |\n|---|---|\n", "| 1 | 2 |\n", "> said\n"],
    *[
        "The watch writes. The keys hang.\n",
        "夜警は書く。\n",
        "def f():\n    return 1\n\n",
        "a,b,c\n",
    ],
    *[
        "    indented\n",
        "}\n",
        "int main() {\n",
        "e\u0301\u0301",
        "👩‍👩‍👧",
        " " * 30,
        "\n" * 20,
        "word " * 30,
    ],
    *["<!-- c\n", "-->\n", "---\n", "\t- tab\n", "_" * 60 + "\n"],
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(PIECES), st.sampled_from(PIECES).map(lambda p: p * 5)), max_size=30
).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("byte_level"), "byte_level"))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("sp"), "sentencepiece"))


def bodies(text: str, chunks: list[Chunk]) -> list[str]:
    return [text[chunk.start : chunk.end] for chunk in chunks]


# --- what always holds ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from(FORMS), st.integers(16, 60), st.booleans(), st.booleans())
def test_bodies_cover_the_text_and_chunks_keep_to_the_limit(
    tokenizer: Tokenizer, spaced: Tokenizer, text: str, form: str, limit: int, lead: bool, sp: bool
) -> None:
    used = spaced if sp else tokenizer
    chunks = split_document(text, used, limit, form=form, headings=lead)
    assert "".join(bodies(text, chunks)) == (text if text.strip() else "")
    done = 0
    for chunk in chunks:
        assert chunk.start == done < chunk.end
        assert list(chunk.token_ids) == used.encode(chunk.text)
        assert 0 < len(chunk.token_ids) <= limit
        assert chunk.text.endswith(text[chunk.start : chunk.end])
        if form.startswith("code"):
            assert chunk.text == text[chunk.start : chunk.end]
        done = chunk.end
    assert split_document(text, used, limit, form=form, headings=lead) == chunks


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from(FORMS), st.integers(16, 60), st.integers(1, 40), st.booleans())
def test_overlap_repeats_no_more_than_asked(
    tokenizer: Tokenizer, text: str, form: str, limit: int, overlap: int, lead: bool
) -> None:
    overlap = min(overlap, limit - 1)
    chunks = split_document(text, tokenizer, limit, overlap, form=form, headings=lead)
    for before, after in pairwise(chunks):
        assert before.start < after.start <= before.end < after.end
        assert len(tokenizer.encode(text[after.start : before.end])) <= overlap
        assert len(after.token_ids) <= limit


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([p for p in PIECES if len(p) < 25 and p.strip()]), max_size=30).map(
        "".join
    ),
    st.sampled_from(FORMS),
    st.integers(40, 60),
)
def test_no_chunk_is_blank(tokenizer: Tokenizer, text: str, form: str, limit: int) -> None:
    for body in bodies(text, split_document(text, tokenizer, limit, form=form)):
        assert body.strip()


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from(FORMS), st.integers(16, 60))
def test_what_comes_after_changes_no_chunk_far_before(
    tokenizer: Tokenizer, text: str, more: str, form: str, limit: int
) -> None:
    """A block may end later for what follows; what ended before its beginning is as it was."""
    before = split_document(text, tokenizer, limit, form=form)
    after = split_document(text + "\n\n" + more, tokenizer, limit, form=form)
    far = len(text) - 16 * limit
    assert [c for c in before if c.end < far] == [c for c in after if c.end < far]


# --- Markdown -------------------------------------------------------------------------------

LINES = [
    *["# A", "## B", "text one", "more", "", "", "", "```", "```py", "~~~", "~~~~", "- item", "- "],
    *["* x", "1. one", "2) two", "  cont", "    four", "> quote", "> > deep", "> - qi", "> ```"],
    *["| a | b |", "|---|---|", "| 1 | 2 |", "a | b", "--- | ---", "===", "***", "- ```", "10. t"],
    *["- # H", "\tcode", "-\ttab", "<!-- c", "-->", "<pre>", "</pre> x", "#no", "- - n", "  - n2"],
    *["    - n3", "  ```", "    ```", "``` a`b", "* * *", "> | a | b |", "> |---|---|", "> # Q"],
]
KINDS = {"fence": CODE, "table_open": TABLE, "list_item_open": ITEM, "blockquote_open": QUOTE}


def test_blocks_are_those_of_commonmark() -> None:
    """Compared with markdown-it on lines put together by chance."""
    from markdown_it import MarkdownIt

    peer = MarkdownIt("commonmark").enable("table")
    chance, others = random.Random(3), 0
    for _ in range(1500):
        text = "\n".join(chance.choice(LINES) for _ in range(chance.randint(1, 8)))
        lines = {0: 0} | {m.end(): n for n, m in enumerate(re.finditer("\n", text), 1)}
        outline = markdown.outline_of(text)
        found = {(lines[s], k) for s, k in zip(outline.start, outline.kind, strict=True) if k}
        levels = {lines[outline.start[h]]: outline.rank[h] for h in outline.headings}
        wanted = set()
        for token in peer.parse(text):
            if token.map and token.type == "heading_open":
                wanted.add((token.map[0], HEADING))
                if not token.level:
                    others += levels.get(token.map[0]) != int(token.tag[1])
            elif token.map and token.type in KINDS:
                wanted.add((token.map[0], KINDS[token.type]))
        code = {item for item in found - wanted if item[1] == CODE}  # indented, raw HTML
        others += found - code != wanted
    assert others <= 8  # such as an HTML block of another kind, which is text here


def guide() -> str:
    parts = ["# Guide\n\nAll of it.\n"]
    for number in range(12):
        parts.append(f"\n## Part {number}\n\n### Detail {number}\n\n")
        parts.append("Sign the blue book. Read the boiler. " * (3 + number % 4) + "\n\n")
        code = "".join(f"value_{number}_{i} = boiler({i})\n\n" for i in range(2 + number % 3))
        parts.append(f"```python\n{code}```\n\n")
        parts.append("".join(f"- step {i} of part {number},\n  gone on\n" for i in range(4)))
    return "".join(parts)


@pytest.mark.parametrize("limit", [90, 110, 128, 200, 300])
def test_fences_items_and_headings_stay_whole(tokenizer: Tokenizer, limit: int) -> None:
    text = guide()
    chunks = split_document(text, tokenizer, limit, form="markdown")
    assert len(chunks) > 6
    for chunk in chunks:
        assert chunk.text.count("```") % 2 == 0
        assert not chunk.text.lstrip().startswith("gone on")
        assert not chunk.text.rstrip().split("\n")[-1].startswith("#")


def test_the_higher_heading_is_cut_at_rather(tokenizer: Tokenizer) -> None:
    said = "Sign the blue book. " * 4 + "\n\n"
    text = (f"## Part\n\n{said}### Detail\n\n{said}### More\n\n{said}") * 6
    one = len(tokenizer.encode(text)) // 6
    chunks = split_document(text, tokenizer, one + one // 4, form="markdown")
    assert [chunk.text[:8] for chunk in chunks] == ["## Part\n"] * 6


def test_a_code_block_larger_than_a_chunk_is_cut_at_blank_lines(tokenizer: Tokenizer) -> None:
    code = "".join(f"def f{i}():\n    first({i})\n\n    second({i})\n\n" for i in range(12))
    text = f"Before it.\n\n```python\n{code}```\n\nAfter.\n"
    chunks = split_document(text, tokenizer, 60, form="markdown")
    assert len(chunks) > 4
    inner = [chunk.text for chunk in chunks if chunk.text.startswith("def")]
    assert len(inner) >= len(chunks) - 2
    assert all(part.endswith(("\n\n", "\n")) for part in inner)


@pytest.mark.parametrize("ending", ["", "\n\nText after it.\n"])
def test_a_large_table_repeats_its_header(tokenizer: Tokenizer, ending: str) -> None:
    head = "| name | age |\n| --- | --: |\n"
    rows = [f"| keeper {i} | {i} |\n" for i in range(60)]
    text = "# Keepers\n\n" + head + "".join(rows) + ending
    chunks = split_document(text, tokenizer, 90, form="markdown")
    tables = [chunk for chunk in chunks if "keeper" in chunk.text]
    assert len(tables) > 4
    for chunk in tables[1:]:
        assert chunk.text.startswith(head)
        assert chunk.text == head + text[chunk.start : chunk.end]
    assert re.findall(r"\| keeper \d+ \| \d+ \|\n", "".join(bodies(text, chunks))) == rows
    assert all(re.search(r"\|\n+\Z|after it.\n\Z", chunk.text) for chunk in tables)


def test_a_table_that_fits_is_not_cut(tokenizer: Tokenizer) -> None:
    table = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 6 + "\n"
    text = ("Some words about it, and more of them. " * 3 + "\n\n" + table) * 8
    chunks = split_document(text, tokenizer, 110, form="markdown")
    assert sum(chunk.text.count(table.rstrip()) for chunk in chunks) == 8


def test_text_form_is_cut_as_before(tokenizer: Tokenizer) -> None:
    """A form nobody knows, too; what looks like Markdown in it is text."""
    text = guide()
    assert split_document(text, tokenizer, 90, form="odd") == split_document(text, tokenizer, 90)
    assert all(not chunk.headings for chunk in split_document(text, tokenizer, 90))


# --- headings and places --------------------------------------------------------------------


def test_chunks_know_their_headings(tokenizer: Tokenizer) -> None:
    text = "intro\n\n# A `b`\n\n" + "Words here. " * 40 + "\n\nSub [x](y)\n---\n\n" + "More. " * 60
    text += "\n\n# C ##\n\n## D\n\n" + "Last words. " * 30
    chunks = split_document(text, tokenizer, 60, form="markdown")
    found = list(dict.fromkeys(chunk.headings for chunk in chunks))
    assert found == [(), ("A b",), ("A b", "Sub x"), ("C", "D")]


def test_headings_in_front_are_those_that_come_before(tokenizer: Tokenizer) -> None:
    text = guide()
    plain = split_document(text, tokenizer, 200, form="markdown")
    chunks = split_document(text, tokenizer, 200, form="markdown", headings=True)
    assert any(chunk.text.startswith("Guide › Part 3 › Detail 3\n\n") for chunk in chunks)
    assert chunks[0] == plain[0]
    for chunk in chunks:
        lead = chunk.text.removesuffix(text[chunk.start : chunk.end])
        own = text[chunk.start : chunk.end].lstrip().split("\n")[0]
        path = [name for name in chunk.headings if not own.startswith("#")]
        if own.startswith("## "):
            path = ["Guide"]
        assert lead == (" › ".join(path) + "\n\n" if path else "")


def test_a_long_heading_leaves_room_for_the_text(tokenizer: Tokenizer) -> None:
    text = "# " + "long heading " * 40 + "\n\n## Short\n\n" + "Words here. " * 200
    chunks = split_document(text, tokenizer, 40, form="markdown", headings=True)
    assert any(chunk.text.startswith("Short\n\n") for chunk in chunks)
    assert all(len(chunk.token_ids) <= 40 for chunk in chunks)


def test_chunks_know_their_pages(tokenizer: Tokenizer) -> None:
    pages = [f"Page number {n} of the book says this and that.\n\n" for n in range(1, 30)]
    marks = tuple(
        Mark(sum(map(len, pages[:index])), "page", index + 1) for index in range(len(pages))
    )
    text = "".join(pages)
    document = Document("book", text, "", kind="pdf", form="text", marks=marks)
    chunks = list(Cutting(60).cut(document, tokenizer))
    assert len(chunks) > 5
    for chunk in chunks:
        numbers = list(map(int, re.findall(r"number (\d+)", chunk.text)))
        assert chunk.place == Place("page", numbers[0], numbers[-1])


# --- rows -----------------------------------------------------------------------------------


def test_rows_stay_whole_and_have_their_header(tokenizer: Tokenizer) -> None:
    chance = random.Random(5)
    rows = [f"{i},{'word ' * chance.randint(1, 7)},{i * 7}\n" for i in range(150)]
    text = "number,words,more\n" + "".join(rows)
    chunks = split_document(text, tokenizer, 64, form="rows")
    assert len(chunks) > 10
    for chunk in chunks:
        assert chunk.text.startswith("number,words,more\n")
        assert set(chunk.text.splitlines(keepends=True)[1:]) <= set(rows)


def test_a_row_larger_than_a_chunk_is_cut_as_text(tokenizer: Tokenizer) -> None:
    text = "a,b\n1,2\n" + "x," + "many words " * 100 + "\n3,4\n"
    chunks = split_document(text, tokenizer, 40, form="rows")
    assert "".join(bodies(text, chunks)) == text
    assert all(chunk.text.startswith("a,b\n") for chunk in chunks)
    assert all(chunk.text.endswith((" ", "\n")) for chunk in chunks)


def test_a_header_larger_than_half_a_chunk_is_not_repeated(tokenizer: Tokenizer) -> None:
    text = ",".join(f"column{i}" for i in range(40)) + "\n" + "1,2,3\n" * 100
    chunks = split_document(text, tokenizer, 32, form="rows")
    assert [chunk.text for chunk in chunks] == bodies(text, chunks)


def test_a_header_of_very_many_columns_is_encoded_whole_but_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ",".join(f"column{i}" for i in range(2000)) + "\n" + "1,2,3\n" * 20
    encoded = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, piece: str) -> list[int]:
        encoded.append(len(piece))
        return encode(self, piece)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    split_document(text, tokenizer, 32, form="rows")
    assert sum(size > len(text) // 2 for size in encoded) <= 2


# --- code -----------------------------------------------------------------------------------

PYTHON = "".join(
    f'@cached\ndef f{i}(x):\n    """Says\n\nthis.\n    """\n'
    + "".join(f"    y = x + {j}\n\n" for j in range(1 + i % 4))
    + f"    return x\n\n\n# About G{i}.\nclass G{i}:\n    a = {i}\n\n"
    + "    def m(self):\n        pass\n\n\n"
    for i in range(12)
)
C = "".join(
    f"/* About f{i}. */\nint f{i}(int x)\n{{\n    if (x) {{\n        x++;\n    }}\n    else {{\n"
    + "        x--;\n" * (i % 5)
    + "    }\n    return x;\n}\n\n"
    for i in range(16)
)


@pytest.mark.parametrize(
    ("language", "text", "starts"),
    [("python", PYTHON, ("@cached\ndef", "# About G")), ("c", C, ("/* About",))],
    ids=["python", "c"],
)
def test_code_is_cut_before_definitions(
    tokenizer: Tokenizer, language: str, text: str, starts: tuple[str, ...]
) -> None:
    for limit in (160, 200, 256):
        chunks = split_document(text, tokenizer, limit, form=f"code:{language}")
        assert len(chunks) > 3
        assert all(chunk.text.startswith(starts) for chunk in chunks)


def test_a_class_larger_than_a_chunk_is_cut_before_its_methods(tokenizer: Tokenizer) -> None:
    method = "    def m{0}(self):\n        first({0})\n\n        second({0})\n\n"
    text = "class Gate:\n" + "".join(method.format(i) for i in range(30))
    chunks = split_document(text, tokenizer, 100, form="code:python")
    assert len(chunks) > 4
    assert all(chunk.text.startswith("    def m") for chunk in chunks[1:])


# --- odd and large text ---------------------------------------------------------------------

LONG: dict[str, tuple[str, Callable[[int], str]]] = {
    "letters": ("markdown", lambda n: "a" * n),
    "underscores": ("markdown", lambda n: "_" * n),
    "headings": ("markdown", lambda n: "## h\n\nt\n\n" * (n // 9)),
    "fences": ("markdown", lambda n: "".join("`" * (3 + i % 50) + "\n" for i in range(n // 28))),
    "unclosed fence": ("markdown", lambda n: "```\n" + "x = 1\n" * (n // 6)),
    "table": ("markdown", lambda n: "|a|b|\n|---|---|\n" + "|1|2|\n" * (n // 6)),
    "items": ("markdown", lambda n: "- a\n" * (n // 4)),
    "deeper items": ("markdown", lambda n: "".join("  " * i + "- x\n" for i in range(int(n**0.5)))),
    "quotes": ("markdown", lambda n: (">" * 1000 + "\n") * (n // 1000)),
    "dashes": ("markdown", lambda n: "- " * (n // 2) + "x"),
    "cells": ("markdown", lambda n: "a|b\n" + "|-" * (n // 2)),
    "comments": ("markdown", lambda n: "<!--\n" * (n // 5)),
    "front matter": ("markdown", lambda n: "---\nx\n" * (n // 6)),
    "links": ("markdown", lambda n: "# " + "[a](" * (n // 4)),
    "blank lines": ("markdown", lambda n: "x" + "\n" * n + "y"),
    "rows": ("rows", lambda n: "a,b,c\n" + "1,2,3\n" * (n // 6)),
    "one row": ("rows", lambda n: "a,b,c\n" + "1,2,3," * (n // 6)),
    "functions": ("code:python", lambda n: "def f():\n    x\n\n" * (n // 16)),
    "deeper code": ("code:c", lambda n: "".join(" " * i + "x\n\n" for i in range(int(n**0.5)))),
}


@pytest.mark.parametrize("name", LONG)
def test_large_and_odd_text_takes_time_in_proportion(tokenizer: Tokenizer, name: str) -> None:
    form, make = LONG[name]
    sizes = 3_000, 24_000
    took = []
    for size in sizes:
        text = make(size)
        begun = time.process_time()
        chunks = split_document(text, tokenizer, 128, form=form, headings=True)
        took.append(time.process_time() - begun)
        assert "".join(bodies(text, chunks)) == text
    assert took[1] < 8 * 4 * took[0] + 0.5  # eight times the text; 64 times would be squared


def test_an_outline_nests() -> None:
    outline = markdown.outline_of("# H\n\n- a\n\n  b\n- c\n")
    assert [outline.parent[n] for n in range(len(outline.start))] == [NONE, NONE, 1, 1, NONE, 4]
