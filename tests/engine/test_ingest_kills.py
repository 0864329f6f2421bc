"""An ingest, or a prompt that saves chunks, killed at any moment: nothing that was said to be done
is lost, every document is wholly old or wholly new, and the next ingest completes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from tests.cache_store.support import scaled
from tests.engine.cut_texts import split_document
from tests.engine.killed_work import DOCUMENTS, document
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.timeout(600)
TRACES = {"half-written file", "file that belongs to no entry"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), folder)
    return Blueprint.open(write_tokenizer(folder), device="cpu", dtype="fp32")


class Workers:
    """Starts children at work, kills them, and knows what they told."""

    def __init__(self, model: Blueprint, root: Path, pipe: Path) -> None:
        self._model, self._root, self._pipe = model, root, pipe
        os.mkfifo(pipe)
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.killed_work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def work(self, what: str, edition: int, kill_after: float | None) -> int:
        """How many steps a child told of, that was killed so many seconds after it began."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        places = {"model": str(self._model.path), "store": str(self._root)}
        job = {**places, "edition": edition, "what": what, "told": str(self._pipe)}
        self._program.stdin.write(json.dumps(job) + "\n")
        self._program.stdin.flush()
        with self._pipe.open("rb") as told:
            child = int(self._program.stdout.readline())
            assert told.read(1) == b"!"
            if kill_after is not None:
                time.sleep(kill_after)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            return len(told.read())  # until the child is gone

    def close(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        assert self._program.wait(60) == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ChunkStore.open(tmp_path / "store", limit_bytes=10**9).close()
    return tmp_path / "store"


@pytest.fixture
def workers(model: Blueprint, root: Path, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(model, root, tmp_path / "told")
    yield found
    found.close()


def cut(model: Blueprint, number: int, edition: int) -> list[str]:
    return [c.text for c in split_document(document(number, edition).text, model.tokenizer, 24, 0)]


def check(root: Path, model: Blueprint, editions: range, told: int) -> None:
    """The store after a kill. told: how many documents of the last edition were said to be done."""
    with ChunkStore.open(root) as store:
        found = store.verify()
        assert found.ok == found.checked
        assert {problem.what for problem in found.problems} <= TRACES
        for number in range(DOCUMENTS):
            texts = [c.text for c in store.catalog.chunks(f"{number}.md")]
            wanted = {edition: cut(model, number, edition) for edition in editions}
            assert not texts or texts in wanted.values()
            if number < told:
                assert texts == wanted[editions[-1]]
            for text in texts:  # what the catalog speaks of is stored
                assert store.keys_of_chunk(chunk_id(text))
                ids = model.tokenizer.encode(text)
                context = model.chunk_context
                regime = model.regime(len(context) + len(ids))
                assert store.contains(model.spec, ids, context, regime)


def test_an_ingest_killed_again_and_again(workers: Workers, model: Blueprint, root: Path) -> None:
    dice, caught = random.Random(11), 0
    kills = scaled(8)
    longest = 0.4
    for edition in range(kills):
        told = workers.work("ingest", edition, dice.uniform(0, longest))
        caught += told < DOCUMENTS
        longest = longest * 0.8 if told == DOCUMENTS else longest * 1.2  # most in the middle
        check(root, model, range(max(0, edition - 20), edition + 1), told)
        if edition % 3 == 2:  # the next one completes
            assert workers.work("ingest", edition, None) == DOCUMENTS
            check(root, model, range(edition, edition + 1), DOCUMENTS)
    assert caught > 0
    assert workers.work("ingest", kills, None) == DOCUMENTS
    with ChunkStore.open(root) as store:
        store.verify(repair=True)
        assert store.verify().problems == ()
    check(root, model, range(kills, kills + 1), DOCUMENTS)
    print(f"{kills} kills, {caught} of them before the end")  # noqa: T201 (the figure, with -s)


def test_a_prompt_killed_while_it_saves(workers: Workers, model: Blueprint, root: Path) -> None:
    assert workers.work("ingest", 0, None) == DOCUMENTS
    dice, answers = random.Random(12), 0
    for _ in range(scaled(4)):
        answers += workers.work("ask", 0, dice.uniform(0.1, 0.5))
        check(root, model, range(1), DOCUMENTS)
    with ChunkStore.open(root) as store:
        store.verify(repair=True)
        assert store.verify().problems == ()
        assert answers == 0 or any(entry.saved for entry in store.entries())
