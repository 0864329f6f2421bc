"""What a choice removes from a store, and what it leaves."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from cache_store.catalog import ChunkText
from cache_store.eviction import set_policy
from cache_store.keys import chunk_id
from cache_store.prune import PruneChoice, documents_to_go, plan_prune, prune
from cache_store.store import ChunkStore
from cache_store.usable import Present
from tests.cache_store.support import BIG, CONTEXT, SPEC, files, in_child, put

DOCUMENTS = {"/a.md": ["one", "shared"], "/b.md": ["two", "shared"], "/c.md": ["three"]}
OTHER = replace(SPEC, model="other" * 8)


@pytest.fixture
def keys(store: ChunkStore) -> dict[str, str]:
    """Entries by their texts; one of a prefix, one of no document, one of another model."""
    for source, texts in DOCUMENTS.items():
        chunks = [ChunkText(chunk_id(t), t, 0, 1, 2) for t in texts]
        store.catalog.replace_document(source, "d", "{}", chunks, size=1, mtime_ns=1)
    texts = ["one", "two", "three", "shared", "of none"]
    found = {t: put(store, (n, n), chunk_id=chunk_id(t)) for n, t in enumerate(texts)}
    found["other"] = put(store, (2, 2), spec=OTHER, chunk_id=chunk_id("three"))
    found["prefix"] = put(store, CONTEXT, ())
    return found


def gone(store: ChunkStore, keys: dict[str, str], choice: PruneChoice) -> set[str]:
    """The names of what it removes; that a plan says the same, and frees what it says."""
    plan = plan_prune(store, choice)
    least = {entry.key for entry in plan.least()}
    documents = documents_to_go(store, plan)
    before = {entry.key for entry in store.entries()}
    report = prune(store, plan)
    there = {entry.key for entry in store.entries()}
    assert before - there == least
    assert report.entries == len(least)
    assert report.documents == documents
    assert store.verify().problems == ()
    assert len(files(store)) == len(there)
    return {name for name, key in keys.items() if key in before - there}


def test_by_model(store: ChunkStore, keys: dict[str, str]) -> None:
    assert gone(store, keys, PruneChoice(models=frozenset({OTHER.model}))) == {"other"}


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (SPEC, {"other"}),
        (replace(SPEC, tokenizer="new" * 8), set(DOCUMENTS) | {"all"}),
        (replace(SPEC, dtype="bf16"), set(DOCUMENTS) | {"all"}),
        (OTHER, {"one", "two", "three", "shared", "of none", "prefix"}),
    ],
)
def test_what_settings_cannot_use(
    store: ChunkStore, keys: dict[str, str], wanted: object, left: set[str]
) -> None:
    stale = gone(store, keys, PruneChoice(present=Present(wanted, CONTEXT)))  # type: ignore[arg-type]
    assert stale == (set(keys) if "all" in left else left)


def test_orphans_are_of_no_document_and_a_prefix_in_use_is_none(
    store: ChunkStore, keys: dict[str, str]
) -> None:
    assert gone(store, keys, PruneChoice(orphans=True)) == {"of none"}
    for source in DOCUMENTS:
        store.catalog.remove_document(source)
    assert gone(store, keys, PruneChoice(orphans=True)) == set(keys) - {"of none"}


def test_missing_documents_go_with_their_own_chunks(
    store: ChunkStore, keys: dict[str, str]
) -> None:
    choice = PruneChoice(missing=frozenset({"/a.md", "/c.md"}))
    assert gone(store, keys, choice) == {"one", "three", "other"}
    assert [d.source for d in store.catalog.documents()] == ["/b.md"]


def test_a_document_stays_while_something_of_its_own_does(
    store: ChunkStore, keys: dict[str, str]
) -> None:
    choice = PruneChoice(missing=frozenset({"/a.md", "/c.md"}), models=frozenset({SPEC.model}))
    assert gone(store, keys, choice) == {"one", "three"}
    assert [d.source for d in store.catalog.documents()] == ["/b.md", "/c.md"]


def test_ages_are_of_storing_and_of_use_and_both_count(
    store: ChunkStore, keys: dict[str, str]
) -> None:
    time.sleep(0.01)
    moment = time.time()
    keys["new"] = put(store, (8, 8))
    store.open_entry(keys["one"]).close()
    assert gone(store, keys, PruneChoice(stored_before=0.0)) == set()
    choice = PruneChoice(used_before=moment, models=frozenset({SPEC.model}))
    assert gone(store, keys, choice) == {"two", "three", "shared", "of none", "prefix"}
    assert gone(store, keys, PruneChoice(stored_before=moment)) == {"one", "other"}
    assert keys["new"] in {entry.key for entry in store.entries()}


@pytest.mark.parametrize(("policy", "first"), [("lru", 1), ("lfu", 0), ("none", 1)])
def test_over_takes_the_fewest_in_the_order_of_eviction(
    store: ChunkStore, policy: str, first: int
) -> None:
    set_policy(store.catalog, policy)  # type: ignore[arg-type]
    keys = [put(store, (n,) * 8, spec=BIG, chunk_id=chunk_id(str(n))) for n in range(6)]
    for _ in range(9):
        store.open_entry(keys[1]).close()
    time.sleep(0.01)
    for key in (keys[0], *keys[2:]):
        store.open_entry(key).close()
    saved = store.put(
        BIG, (9,) * 8, (), "", [(bytes(2**15),) * 2] * 4, chunk_id=chunk_id("9"), saved=True
    )
    size = next(store.entries()).nbytes
    plan = plan_prune(store, PruneChoice(over=store.used_bytes() - size - 1))
    report = prune(store, plan)
    assert report.entries == 2  # one would leave it a byte over
    there = {entry.key for entry in store.entries()}
    assert {saved, keys[first]} & there == set()  # what a prompt saved goes first
    assert plan_prune(store, PruneChoice(over=2**30)).entries == ()


def test_pinned_documents_stay_whatever_is_chosen(store: ChunkStore, keys: dict[str, str]) -> None:
    with store.catalog.writing() as db:
        db.execute("UPDATE document SET pinned = 1 WHERE source = '/a.md'")
    choice = PruneChoice(models=frozenset({SPEC.model}))
    assert plan_prune(store, choice).pinned == 2
    assert gone(store, keys, choice) == {"two", "three", "of none", "prefix"}
    assert gone(store, keys, PruneChoice(missing=frozenset({"/a.md"}))) == set()
    assert store.catalog.document("/a.md") is not None


def test_what_another_process_reads_is_passed_over(store: ChunkStore, keys: dict[str, str]) -> None:
    path, key = store.path, keys["two"]
    ready = path.parent / "ready"
    done = path.parent / "done"

    def hold() -> None:
        with ChunkStore.open(path) as mine, mine.open_entry(key):
            ready.touch()
            while not done.exists():
                time.sleep(0.005)

    child = in_child(hold)
    while not ready.exists():
        time.sleep(0.005)
    report = prune(store, plan_prune(store, PruneChoice(models=frozenset({SPEC.model}))))
    done.touch()
    os.waitpid(child, 0)
    assert report.in_use == 1
    assert key in {entry.key for entry in store.entries()}
