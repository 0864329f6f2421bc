"""Every file is read or named, whatever it is."""

import random
from pathlib import Path

import pytest

from engine.documents import Document, Skipped, Unreadable, find_files, read_documents
from tests.engine.documents import awkward
from tests.engine.documents.reading import document, read

KINDS = {"txt": "text", "md": "markdown", "tsv": "csv", "ipynb": "notebook", "py": "code"}


@pytest.mark.parametrize("name", awkward.GOOD)
def test_each_format_is_read(tmp_path: Path, name: str) -> None:
    found = document(tmp_path, name, awkward.GOOD[name]())
    suffix = name.rsplit(".", 1)[1]
    assert found.kind == KINDS.get(suffix, suffix)
    assert found.text.strip()
    assert found.notes == ()


@pytest.mark.parametrize("name", awkward.WRONG_NAME)
def test_a_wrong_name_does_not_matter(tmp_path: Path, name: str) -> None:
    found = document(tmp_path, name, awkward.WRONG_NAME[name]())
    what = name.split(".", 1)[0]
    if what != "text":
        assert found.kind == what
    else:
        assert found.text.strip() == awkward.WORDS.strip()


@pytest.mark.parametrize("name", [*awkward.EMPTY, *awkward.BLANK])
def test_empty_and_blank_files_are_documents_without_text(tmp_path: Path, name: str) -> None:
    found = document(tmp_path, name, (awkward.EMPTY | awkward.BLANK)[name])
    assert not found.text.strip()
    assert found.notes == ()


@pytest.mark.parametrize("name", awkward.UNREADABLE)
@pytest.mark.parametrize("named", [False, True])
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, named: bool) -> None:
    make, why = awkward.UNREADABLE[name]
    found = read(tmp_path, name, make(), named=named)
    assert isinstance(found, Unreadable), found
    assert why in found.reason


@pytest.mark.parametrize("name", awkward.SKIPPED)
def test_what_is_left_out_is_counted_by_its_kind(tmp_path: Path, name: str) -> None:
    make, what = awkward.SKIPPED[name]
    found = read(tmp_path, name, make())
    assert found == Skipped((tmp_path / name).as_posix(), what)
    refused = read(tmp_path, name, make(), named=True)
    if what != "image" or name != "drawing.svg":
        assert isinstance(refused, Unreadable)
        assert what in refused.reason


@pytest.mark.parametrize("name", awkward.GOOD)
def test_a_file_cut_off_anywhere_is_read_or_named(tmp_path: Path, name: str) -> None:
    whole = awkward.GOOD[name]()
    for tenth in range(10):
        cut = whole[: len(whole) * tenth // 10]
        for kept in (cut, cut[:-1], cut + b"\xff\0\n"):
            found = read(tmp_path, name, kept)
            assert isinstance(found, Document | Unreadable | Skipped)
            if isinstance(found, Document):
                found.text.encode()


def test_random_bytes_behind_each_beginning_are_read_or_named(tmp_path: Path) -> None:
    randomly = random.Random(7)
    beginnings = [b"%PDF-1.7\n", b"PK\x03\x04", b"PK\x05\x06", b"\xff\xfe", b"<html>", b"{", b"["]
    beginnings += [make()[:600] for make in awkward.GOOD.values()]
    for start in beginnings:
        for suffix in ("pdf", "docx", "epub", "txt", "csv", "json", "ipynb", "html", "md", "x"):
            found = read(tmp_path, f"a.{suffix}", start + randomly.randbytes(400))
            assert isinstance(found, Document | Unreadable | Skipped)


def test_damage_inside_is_read_or_named(tmp_path: Path) -> None:
    randomly = random.Random(3)
    for name in ("a.pdf", "a.docx", "a.epub", "a.html"):
        whole = awkward.GOOD[name]()
        for _ in range(12):
            broken = bytearray(whole)
            for _ in range(5):
                broken[randomly.randrange(len(broken))] = randomly.randrange(256)
            assert isinstance(read(tmp_path, name, bytes(broken)), Document | Unreadable | Skipped)


def test_a_file_that_goes_while_it_is_read(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.docx", "c.txt"):
        (tmp_path / name).write_bytes(awkward.GOOD[f"a{name[1:]}"]())
    found = find_files([tmp_path])
    items = read_documents(found)
    assert isinstance(next(items), Document)
    (tmp_path / "b.docx").unlink()
    assert [type(item) for item in items] == [Unreadable, Document]
