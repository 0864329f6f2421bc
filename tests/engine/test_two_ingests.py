"""Two ingests at one store share the work: no chunk is computed twice, none is lost."""

import threading
import time
from pathlib import Path

import pytest

import engine.ingest
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.documents import Document
from engine.ingest import IngestReport, run_ingest
from engine.ingest_plan import Cutter, Cutting, IngestPlan
from engine.model import Decoder
from engine.precompute import ChunkWriter
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

pytestmark = pytest.mark.timeout(120)

DOCUMENTS = [
    Document(f"{n}.md", f"{n}", " ".join(f"Word {n} {i} of a text." for i in range(40)))
    for n in range(16)
]


class SlowWriter(ChunkWriter):
    """Takes its time over every batch, of two chunks, so that two ingests overlap."""

    def batches(self, chunks):  # type: ignore[no-untyped-def]
        some = []
        for chunk in chunks:
            some.append(chunk)
            if len(some) == 2:
                yield some
                time.sleep(0.02)
                some = []
        if some:
            yield some


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Blueprint:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), folder)
    return Blueprint.open(write_tokenizer(folder), device="cpu", dtype="fp32")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ChunkStore.open(tmp_path / "store", limit_bytes=10**9).close()
    return tmp_path / "store"


def planned(model: Blueprint, store: ChunkStore) -> tuple[Cutter, IngestPlan]:
    cutter = Cutter(store, model, Cutting(chunk_tokens=16))
    return cutter, cutter.plan(DOCUMENTS)


def ingest(model: Blueprint, cutter: Cutter, plan: IngestPlan) -> IngestReport:
    report = IngestReport()
    decoder = Decoder.load(model.path, "cpu", "fp32")

    def writer() -> SlowWriter:
        prefix = model.template.prefix
        return SlowWriter(decoder, cutter.store, model.spec, model.chunk_context, prefix)

    run_ingest(plan, cutter, writer, report, lambda tokens: None)
    return report


def test_no_chunk_is_computed_twice(model: Blueprint, root: Path) -> None:
    start = threading.Barrier(2)
    reports: list[IngestReport] = []
    chunks: set[str] = set()

    def one() -> None:
        with ChunkStore.open(root) as store:
            cutter, plan = planned(model, store)
            chunks.update(plan.missing)
            start.wait(60)  # both found nothing stored
            reports.append(ingest(model, cutter, plan))
            for document in DOCUMENTS:
                assert store.catalog.document(document.source) is not None

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2
    assert len(chunks) > 12
    assert sum(report.computed_chunks for report in reports) == len(chunks)
    assert all(report.computed_chunks > 0 for report in reports)
    with ChunkStore.open(root) as store:
        assert store.verify().problems == ()
        assert {e.chunk_id for e in store.entries()} - {""} == chunks


def test_what_another_claims_and_never_stores_is_computed_in_the_end(
    model: Blueprint, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.ingest, "PATIENCE", 0.2)
    with ChunkStore.open(root) as other, ChunkStore.open(root) as store:
        cutter, plan = planned(model, store)
        texts = [c.text for document in plan.documents for c in document.chunks]
        for text in texts[:3]:
            assert other.claim(cutter.key(model.tokenizer.encode(text)))
        report = ingest(model, cutter, plan)
        assert report.computed_chunks == len(plan.missing)
        assert report.documents == len(DOCUMENTS)


def test_what_another_gave_up_is_computed_at_once(model: Blueprint, root: Path) -> None:
    other = ChunkStore.open(root)
    with ChunkStore.open(root) as store:
        cutter, plan = planned(model, store)
        for document in plan.documents:
            for chunk in document.chunks:
                other.claim(cutter.key(model.tokenizer.encode(chunk.text)))
        timer = threading.Timer(0.3, other._space.lease.close)
        timer.start()
        began = time.monotonic()
        report = ingest(model, cutter, plan)
        timer.join()
        assert report.computed_chunks == len(plan.missing)
        assert time.monotonic() - began < engine.ingest.PATIENCE
    other.close()
