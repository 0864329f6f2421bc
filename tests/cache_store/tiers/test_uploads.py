"""Uploads give up soon where nothing answers, and count what became of each entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache_store.catalog import Catalog
from cache_store.store import ChunkStore
from cache_store.tiers.protocol import RemoteError
from cache_store.tiers.uploads import Sending, Uploads


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return ChunkStore.open(tmp_path / "store", limit_bytes=2**26).catalog


def test_a_remote_that_answers_nothing_is_asked_once(catalog: Catalog) -> None:
    asked = []

    def send(key: str) -> Sending:
        asked.append(key)
        raise RemoteError("no answer")

    uploads = Uploads(catalog, send, lambda note: None)
    uploads.add(["a", "b"])
    uploads.retry()
    assert uploads.wait(20) == 2
    assert asked == ["a"]
    assert uploads.failure is not None


def test_what_was_there_is_counted_apart_and_one_failure_is_passed_over(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache_store.tiers.uploads._PAUSE_SECONDS", 0.01)
    failing = ["b"]

    def send(key: str) -> Sending:
        if key in failing:
            failing.remove(key)
            raise RemoteError("lost for a moment")
        return "there" if key == "c" else "sent"

    uploads = Uploads(catalog, send, lambda note: None)
    uploads.add(["a", "b", "c"])
    uploads.retry()
    assert uploads.wait(20) == 0
    assert (uploads.done["sent"], uploads.done["there"]) == (2, 1)


def test_a_failure_that_was_told_is_not_told_again(catalog: Catalog) -> None:
    def send(key: str) -> Sending:
        raise RemoteError("Connection refused.")

    said: list[str] = []
    for told in (True, False):
        uploads = Uploads(catalog, send, said.append, lambda why, told=told: told)
        uploads.add(["a"])
        uploads.retry()
        uploads.wait(20)
        uploads.close(1)
    assert [line.count("refused") for line in said] == [0, 1]
    assert "refused. (" not in said[1]
