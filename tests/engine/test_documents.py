"""Whatever lies in a folder, the run goes on, and what was left out is told."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import NotFoundError
from engine.documents import (
    Document,
    FoundFile,
    Skipped,
    Unreadable,
    find_files,
    read_document,
    read_documents,
)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(*paths: str) -> list[Document | Unreadable | Skipped]:
    return list(read_documents(find_files(paths)))


def sources(*paths: str) -> list[str]:
    return [item.source for item in find_files(paths) if not isinstance(item, Skipped)]


def at(*names: str) -> list[str]:
    """The sources of files in the current folder, whose path holds no link."""
    return [f"{Path.cwd().as_posix()}/{name}" for name in names]


def text_of(raw: bytes) -> str:
    Path("file.txt").write_bytes(raw)
    (document,) = read("file.txt")
    assert isinstance(document, Document), document
    return document.text


def reason(path: str) -> str:
    (item,) = read(path)
    assert isinstance(item, Unreadable), item
    return item.reason


def tree(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")


# --- finding --------------------------------------------------------------------------------


def test_folders_are_walked_in_sorted_order_and_hidden_names_passed_over() -> None:
    tree("d/b.txt", "d/a/z.md", "d/a/c.rst", "d/B.py", "d/.DS_Store", "d/.git/config", "d/a/.x")
    assert sources("d") == at("d/B.py", "d/a/c.rst", "d/a/z.md", "d/b.txt")
    assert sources("d/.git", "d/a/.x") == at("d/.git/config", "d/a/.x")  # typed, so meant


def test_files_come_in_the_order_typed_and_once() -> None:
    tree("d/a.txt", "d/b.txt", "c.txt")
    Path("link").symlink_to("d")
    assert sources("d/b.txt", "d", "c.txt", "./d/a.txt", "link") == at(
        "d/b.txt", "d/a.txt", "c.txt"
    )


def test_sources_are_absolute_however_the_path_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree("work/d/a.txt", "other/b.txt")
    inside, outside = at("work/d/a.txt", "other/b.txt")
    monkeypatch.chdir(tmp_path / "work")
    assert sources(str(tmp_path / "work/d")) == [inside]
    assert sources("./d//a.txt") == [inside]
    assert sources(outside) == [outside]
    assert sources("../other") == [outside]
    assert sources("d/../../other/b.txt") == [outside]
    assert sources(".") == [inside]
    assert [item.source for item in read(".", "../other")] == [inside, outside]


def test_a_source_is_the_file_and_not_the_folder_it_is_ingested_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree("one/docs/readme.md", "two/docs/readme.md")
    first, second = at("one/docs/readme.md", "two/docs/readme.md")
    monkeypatch.chdir(tmp_path / "one")
    assert sources("docs/readme.md") == [first]
    assert sources("../two/docs") == [second]
    monkeypatch.chdir(tmp_path / "two")
    assert sources("docs/readme.md") == [second]
    assert sources("../one/docs") == [first]


def test_a_typed_path_that_is_not_there_is_an_error() -> None:
    tree("a.txt")
    Path("broken").symlink_to("nowhere")
    for path in ["nowhere", "a.txt/x", "", "broken", "nul\0", "\ud800"]:
        with pytest.raises(NotFoundError):
            find_files(["a.txt", path])
    assert "too long" in reason("x" * 300)


def test_links_in_folders_are_not_followed_and_broken_ones_told() -> None:
    tree("d/a.txt", "outside/secret.txt")
    Path("d/loop").symlink_to("..")
    Path("d/out").symlink_to("../outside/secret.txt")
    Path("d/broken").symlink_to("nowhere")
    Path("d/self").symlink_to("self")
    items = {item.source: item for item in read("d")}
    text, broken, itself = at("d/a.txt", "d/broken", "d/self")
    assert isinstance(items.pop(text), Document)
    assert isinstance(items.pop(broken), Unreadable)
    assert isinstance(items.pop(itself), Unreadable)
    assert all(isinstance(item, Skipped) for item in items.values())
    assert set(items) == set(at("d/loop", "d/out"))


def test_a_typed_link_is_followed() -> None:
    tree("real/a.txt")
    Path("file").symlink_to("real/a.txt")
    Path("folder").symlink_to("real")
    assert isinstance(read("file")[0], Document)
    assert sources("folder") == at("folder/a.txt")


def test_an_empty_folder_has_no_files() -> None:
    Path("d").mkdir()
    assert list(find_files(["d"])) == []
    assert list(find_files([])) == []


def test_file_names_that_are_not_text() -> None:
    tree("d/line\nbreak.txt")
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        Path("d", os.fsdecode(name)).write_bytes(b"hi")
    found = read("d")
    shown = at("d/caf\\xe8.txt", "d/caf\\xe9.txt", "d/line\\x0abreak.txt")
    assert [item.source for item in found] == shown
    assert all(isinstance(item, Document) for item in found)
    assert "caf\\xe7" in str(_error(os.fsdecode(b"caf\xe7")))


def _error(path: str) -> NotFoundError:
    with pytest.raises(NotFoundError) as caught:
        find_files([path])
    str(caught.value).encode()  # printable
    return caught.value


# --- decoding -------------------------------------------------------------------------------


def test_marks_and_line_ends_do_not_change_the_text() -> None:
    text = "Größe\nnext 😀\n\n"
    variants = [
        text.encode(),
        text.encode("utf-8-sig"),
        text.replace("\n", "\r\n").encode(),
        text.replace("\n", "\r").encode(),
        text.encode("utf-16"),
        b"\xfe\xff" + text.encode("utf-16-be"),
        text.encode("utf-32"),
        b"\x00\x00\xfe\xff" + text.encode("utf-32-be"),
    ]
    digests = set()
    for raw in variants:
        Path("file.txt").write_bytes(raw)
        (document,) = read("file.txt")
        assert isinstance(document, Document)
        assert document.text == text
        digests.add(document.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "café\n"),
        ("cp1252", "Der Kessel “läuft” über – Größe."),
        ("cp1250", "Zażółć gęślą jaźń, proszę państwa."),
        ("cp1251", "Привет, мир. Это журнал ночной смены."),
        ("koi8_r", "Привет, мир. Это журнал ночной смены."),
        ("shift_jis", "夜警は毎晩ボイラーの値を青い本に書く。"),
        ("gb18030", "夜班每晚把锅炉的读数写进蓝色的本子。"),
        ("cp949", "안녕하세요 세계. 이것은 야간 근무 일지입니다."),
    ],
)
def test_old_encodings_are_guessed(encoding: str, text: str) -> None:
    assert text_of(text.encode(encoding)) == text


def test_a_large_file_in_an_old_encoding() -> None:
    text = "夜警は毎晩ボイラーの値を青い本に書く。\n" * 20_000
    assert text_of(text.encode("shift_jis")) == text


def test_utf8_that_stops_inside_a_character() -> None:
    assert text_of("Größe: 😀".encode()[:-1]) == "Größe: \ufffd"


@pytest.mark.parametrize("raw", [b"", b" \n\t \n", b"\xef\xbb\xbf", b"\r\n\r\n"])
def test_empty_and_blank_files_are_documents(raw: bytes) -> None:
    assert text_of(raw).strip() == ""


def test_text_with_escape_sequences_is_text() -> None:
    text = "\x1b[31mred\x1b[0m " * 50
    assert text_of(text.encode()) == text


BINARY = {
    "nul": b"text\0text",
    "nul far in": b"text " * 100_000 + b"\0",
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "control bytes": bytes(range(1, 9)) * 20,
    "elf": b"\x7fELF\x02\x01\x01\0",
}


@pytest.mark.parametrize("name", BINARY)
def test_binaries_are_skipped_in_folders_and_refused_when_named(name: str) -> None:
    Path("d").mkdir()
    Path("d/file").write_bytes(BINARY[name])
    (source,) = at("d/file")
    what = "image" if name == "png" else "binary"
    assert read("d") == [Skipped(source, what)]
    assert what in reason("d/file")


def test_undecodable_text_is_told() -> None:
    Path("file.txt").write_bytes(b"\xff\xfe" + b"a\xd8" + b"b")  # UTF-16 cut and broken
    assert "encoding" in reason("file.txt")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_told(raw: bytes) -> None:
    Path("any").write_bytes(raw)
    (item,) = read("any")
    if isinstance(item, Document):
        assert "\r" not in item.text
        assert "\0" not in item.text
        item.text.encode()
    else:
        assert item.reason


# --- files that cannot be read --------------------------------------------------------------


def test_pipes_sockets_and_devices_do_not_block() -> None:
    Path("d").mkdir()
    os.mkfifo("d/pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("d/socket")
        items = read("d")
    assert [type(item) for item in items] == [Unreadable, Unreadable]
    assert [item.source for item in items] == at("d/pipe", "d/socket")
    assert "pipe" in reason("d/pipe")
    assert "device" in reason("/dev/zero")


def test_a_file_that_fails_to_read_does_not_stop_the_others() -> None:
    tree("a.txt", "b.txt", "c.txt")
    found = list(find_files(["a.txt", "b.txt", "c.txt"]))
    Path("b.txt").unlink()  # gone since it was found
    assert [type(item) for item in read_documents(found)] == [Document, Unreadable, Document]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_an_input_error_is_told() -> None:
    assert "error" in reason("/proc/self/mem")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_forbidden_files_and_folders_are_told() -> None:
    tree("d/a.txt", "d/no/b.txt", "d/z.txt")
    Path("d/a.txt").chmod(0)
    Path("d/no").chmod(0)
    kinds = [type(item) for item in read("d")]
    Path("d/no").chmod(0o700)
    assert kinds == [Unreadable, Unreadable, Document]


def test_a_file_swapped_for_a_link_or_pipe_since_it_was_found() -> None:
    tree("d/a.txt", "d/b.txt", "secret")
    found = list(find_files(["d"]))
    Path("d/a.txt").unlink()
    Path("d/a.txt").symlink_to("../secret")
    Path("d/b.txt").unlink()
    os.mkfifo("d/b.txt")
    assert [type(item) for item in read_documents(found)] == [Unreadable, Unreadable]


def test_too_large_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.documents.reading.MAX_BYTES", 20_000)
    Path("large").write_text("x" * 20_001)
    Path("fits").write_text("x" * 20_000)
    assert "larger" in reason("large")
    assert isinstance(read("fits")[0], Document)
    stdin = io.BytesIO(b"x" * 20_001)
    (item,) = read_documents(find_files(["-"]), stdin=stdin)
    assert isinstance(item, Unreadable)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_file_larger_than_it_says_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that grows while it is read: its size is given as 0."""
    monkeypatch.setattr("engine.documents.reading.MAX_BYTES", 20_000)
    assert Path("/proc/self/smaps").stat().st_size == 0
    assert "larger" in reason("/proc/self/smaps")


# --- standard input -------------------------------------------------------------------------


def test_standard_input_is_read_once_under_the_name_given() -> None:
    found = list(find_files(["-", "-"], stdin_name="notes"))
    assert found == [FoundFile("notes", None, named=True)]
    (document,) = read_documents(found, stdin=io.BytesIO(b"hello\r\n"))
    assert isinstance(document, Document)
    assert (document.source, document.text) == ("notes", "hello\n")


def test_binary_or_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = find_files(["-"])
    assert isinstance(file, FoundFile)
    assert isinstance(read_document(file, stdin=io.BytesIO(b"\0")), Unreadable)
    monkeypatch.setattr("sys.stdin", None)
    assert read_document(file) == Unreadable("stdin", "is closed")


def test_dots_behind_a_link_lead_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "x/y").mkdir(parents=True)
    (tmp_path / "z").mkdir()
    (tmp_path / "z/l").symlink_to(tmp_path / "x/y")
    (tmp_path / "x/a.txt").write_text("in x")
    (tmp_path / "z/a.txt").write_text("in z")
    sources = [
        item.source for item in find_files([tmp_path / "z/l/../a.txt", tmp_path / "z/a.txt"])
    ]
    assert sources == [(tmp_path / "x/a.txt").as_posix(), (tmp_path / "z/a.txt").as_posix()]
