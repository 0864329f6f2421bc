"""Cutting and planning hold little beside the text itself, however large it is."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from cache_store.errors import StoreFullError
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.chunking import Cutting
from engine.documents import Document
from engine.ingest_plan import Cutter
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

BYTES = int(120_000 * float(os.environ.get("CACHEBLEND_STRESS", "1")))
"""20 MB with CACHEBLEND_STRESS=170."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), folder)
    return Blueprint.open(write_tokenizer(folder), device="cpu", dtype="fp32")


def document(form: str) -> Document:
    line = "Sign the blue book {0}, and read the boiler {0} at the gate. It hums.\n"
    parts = [f"## Part {n}\n\n{line.format(n) * 9}\n" for n in range(BYTES // 600)]
    return Document("large", "".join(parts)[:BYTES], "", form=form)


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_cutting_holds_no_more_than_a_few_chunks(model: Blueprint, form: str) -> None:
    """Ids of all chunks would be some thirty times this; blocks take thirty bytes each."""
    large = document(form)
    list(Cutting(256).cut(Document("small", large.text[:20_000], "", form=form), model.tokenizer))
    tracemalloc.start()
    try:
        tokens = sum(len(c.token_ids) for c in Cutting(256).cut(large, model.tokenizer))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokens > BYTES // 5
    assert peak < 500_000 + BYTES // 5


def test_a_plan_that_is_refused_holds_no_texts(model: Blueprint, tmp_path: Path) -> None:
    """It names the whole of what is needed all the same."""
    large = document("text")
    with ChunkStore.open(tmp_path / "store", limit_bytes=5 * 2**20) as store:
        cutter = Cutter(store, model, Cutting(256))
        chunks = list(Cutting(256).cut(large, model.tokenizer))
        needed = sum(cutter.predicted_bytes(len(chunk.token_ids)) for chunk in chunks)
        assert needed > 2 * store.limit
        del chunks
        tracemalloc.start()
        try:
            with pytest.raises(StoreFullError, match=r"limit of \d+ bytes") as refused:
                cutter.plan([large])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        said = int(refused.value.message.split("limit of ")[1].split()[0])
        assert needed < said < 1.05 * needed + 2**20
    assert peak < 700_000 + 1.5 * BYTES
