"""Reading with several processes gives what reading with one gives, whatever a file does to a
reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.documents import Document, FoundFile, Unreadable, find_files, parallel, read_documents
from engine.documents.reading import read_document
from engine.workers import WorkerPool

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def page(text: str) -> str:
    return f"<!DOCTYPE html><html><body><article><p>{text}</p></article></body></html>"


@contextmanager
def hostile_reader(name: str) -> Iterator[object]:
    def read(file: FoundFile) -> object:
        if "dies" in file.source:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "hangs" in file.source:
            time.sleep(600)
        return read_document(file)

    yield read


def test_the_same_documents_in_the_same_order_and_a_reader_costs_one_file_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(4):
        Path(f"{number}a.html").write_text(page(f"Page {number} tells of the harbour. " * 5))
        Path(f"{number}b.md").write_text(f"# Text {number}\n")
        Path(f"{number}c.txt").write_text(page(f"No text but page {number}."))
    Path("1dies.html").write_text(page("x"))
    Path("2hangs.html").write_text(page("x"))
    Path("3e.pdf").write_bytes(b"%PDF-1.4 broken")
    wanted = {item.source: item for item in read_documents(find_files(["."]))}
    monkeypatch.setattr(parallel, "reader", hostile_reader)
    monkeypatch.setattr(parallel, "_patience", lambda file: 2.0 if "hangs" in file.source else 60.0)
    found = list(parallel.read_in_parallel(find_files(["."]), 2))
    assert [item.source for item in found] == list(wanted)
    told = {Path(i.source).name: i.reason for i in found if isinstance(i, Unreadable)}
    assert "its worker was killed by SIGSEGV" in told.pop("1dies.html")
    assert "it took longer than 2 s" in told.pop("2hangs.html")
    assert set(told) == {"3e.pdf"}
    for item in found:
        if "dies" not in item.source and "hangs" not in item.source:
            assert item == wanted[item.source]
    assert sum(isinstance(item, Document) for item in found) == 12


def test_texts_alone_start_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        Path(f"{number}.md").write_text("text")
    monkeypatch.setattr(WorkerPool, "_start", lambda *a: pytest.fail("a reader was started"))
    assert len(list(parallel.read_in_parallel(find_files(["."]), 4))) == 5


def test_what_looks_binary_is_read_where_it_is_text_all_the_same() -> None:
    Path("nul.txt").write_bytes("caf\u00e9\0end".encode())
    Path("noise").write_bytes(bytes(range(1, 9)) * 20 + b"\xff\0")

    def read(binary: bool) -> list[str]:
        files = [FoundFile(n, Path(n), False, binary) for n in ("nul.txt", "noise")]
        return [getattr(item, "text", "") for item in map(read_document, files)]

    assert read(binary=False) == ["", ""]
    assert read(binary=True) == ["caf\u00e9\ufffdend", ""]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to it")
def test_a_reader_that_wants_all_memory_gets_none() -> None:
    code = (
        "from engine.documents.parallel import MOST_MEMORY, reader\n"
        "with reader('reader 1'):\n"
        "    bytearray(MOST_MEMORY)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert b"MemoryError" in run.stderr
