"""Documents into the store: their chunks' KV computed, the catalog brought up to date."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_store.store import ChunkStore
from engine.ingest_plan import Cutter, DocumentPlan, IngestPlan
from engine.precompute import OnStored
from engine.prompt import PromptChunk

PATIENCE = 30.0  # seconds to wait for another ingest that stores nothing
POLL_SECONDS = 0.05
LATEST = 50  # chunks that a report keeps


@dataclass
class IngestReport:
    """What has been done so far; complete when `run_ingest` returns. Any thread may look.

    computed_bytes: of the computed chunks' entries; latest: ids of the last of them, in order.
    removed: sources of documents that were taken out; dropped_chunks: that no document
    has any more.
    """

    documents: int = 0
    computed_chunks: int = 0
    computed_tokens: int = 0
    computed_bytes: int = 0
    latest: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    dropped_chunks: int = 0
    dropped_bytes: int = 0


class ChunkComputer(Protocol):
    """Computes the KV of chunks behind one context, and stores it: `ChunkWriter`, or several."""

    def write_prefix(self) -> str: ...

    def held(self, token_ids: Sequence[int]) -> str | None: ...

    def write_all(self, chunks: Iterable[PromptChunk], on_stored: OnStored) -> None: ...


def run_ingest(
    plan: IngestPlan,
    cutter: Cutter,
    make_writer: Callable[[], ChunkComputer],
    report: IngestReport,
    on_tokens: Callable[[int], None],
    collections: Sequence[str] = (),
) -> None:
    """Computes what is missing, and keeps `report` up to date.

    A document enters the catalog once all its chunks are stored, and those before it are in, so
    that stopping at any moment leaves a good store and the next run goes on from there. Chunks that
    a changed document no longer has, and no other document has, are dropped. on_tokens gets the
    tokens computed so far, in whichever thread stores them. All documents come into `collections`,
    those that are unchanged at once. make_writer is called only where there
    is something to compute. Raises StoreFullError.
    """
    for key in plan.held:
        cutter.store.protect(key)
    for name in collections:
        unchanged = [d.source for d in plan.documents if d.state == "unchanged"]
        cutter.store.catalog.collect(name, unchanged)
    ledger = _Ledger(plan, cutter, report, on_tokens, collections)
    if not plan.missing and not plan.lacks_prefix:
        ledger.advance()
        return
    writer = make_writer()
    cutter.store.protect(writer.write_prefix())
    ledger.advance()
    writer.write_all(ledger.missing(writer), ledger.stored)
    while chunks := ledger.left(writer):
        writer.write_all(chunks, ledger.stored)


class _Ledger:
    """Which chunks are still to be stored, and which documents wait for them.

    Chunks are told of by the thread that stores them while another looks for the next.
    """

    def __init__(
        self,
        plan: IngestPlan,
        cutter: Cutter,
        report: IngestReport,
        on_tokens: Callable[[int], None],
        collections: Sequence[str],
    ) -> None:
        self._collections = collections
        self._plan, self._cutter, self._report = plan, cutter, report
        self._on_tokens = on_tokens
        self._settings = cutter.cutting.record(cutter.model.tokenizer.fingerprint)
        self._planned = {c.chunk_id for document in plan.documents for c in document.chunks}
        self._awaited = set(plan.missing)
        self._document = self._chunk = 0  # what comes before this chunk is done
        self._others: list[PromptChunk] = []  # what another ingest is computing
        self._lock = threading.Lock()

    def missing(self, writer: ChunkComputer) -> Iterator[PromptChunk]:
        """What is to be computed, in the documents' order, but for what another ingest is at."""
        unseen = set(self._plan.missing)
        for document in self._plan.documents:
            for chunk in document.chunks:
                if chunk.chunk_id not in unseen:
                    continue
                unseen.discard(chunk.chunk_id)
                ids = tuple(self._cutter.model.tokenizer.encode(chunk.text))
                key = writer.held(ids)
                claimed = key is None and self._cutter.store.claim(self._cutter.key(ids))
                if claimed:  # and wasn't stored by another until then
                    key = writer.held(ids)
                if key is not None:  # another ingest was faster
                    self._settle(chunk.chunk_id, key)
                elif claimed:
                    yield PromptChunk(ids, chunk.chunk_id)
                else:
                    self._others.append(PromptChunk(ids, chunk.chunk_id))

    def left(self, writer: ChunkComputer) -> list[PromptChunk]:
        """What is to be computed once all else is stored: what another ingest was computing and
        gave up, or doesn't get on with. Waits while it does.

        As everything this ingest said it would compute is stored by then, two never wait for each
        other; and nobody waits longer than PATIENCE for nothing.
        """
        until = time.monotonic() + PATIENCE
        while self._others:
            waiting, ours = [], []
            for chunk in self._others:
                claimed = self._cutter.store.claim(self._cutter.key(chunk.token_ids))
                key = writer.held(chunk.token_ids)
                if key is not None:
                    self._settle(chunk.chunk_id or "", key)
                elif claimed:
                    ours.append(chunk)
                else:
                    waiting.append(chunk)
            if len(waiting) < len(self._others):
                until = time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                waiting, ours = [], waiting
            self._others = waiting
            if ours:
                return ours
            if waiting:
                time.sleep(POLL_SECONDS)
        return []

    def stored(self, chunk: PromptChunk, key: str) -> None:
        """A chunk was computed and stored."""
        self._report.computed_chunks += 1
        self._report.computed_tokens += len(chunk.token_ids)
        self._report.computed_bytes += self._cutter.predicted_bytes(len(chunk.token_ids))
        self._report.latest = (*self._report.latest, chunk.chunk_id or "")[-LATEST:]
        self._settle(chunk.chunk_id or "", key)
        self._on_tokens(self._report.computed_tokens)

    def _settle(self, name: str, key: str) -> None:
        self._cutter.store.protect(key)
        with self._lock:
            self._awaited.discard(name)
        self.advance()

    def advance(self) -> None:
        """Puts documents into the catalog, in their order, up to the first that lacks a chunk."""
        with self._lock:
            while self._document < len(self._plan.documents):
                document = self._plan.documents[self._document]
                while self._chunk < len(document.chunks):
                    if document.chunks[self._chunk].chunk_id in self._awaited:
                        return
                    self._chunk += 1
                self._enter(document)
                self._document, self._chunk = self._document + 1, 0

    def _enter(self, document: DocumentPlan) -> None:
        store, catalog = self._cutter.store, self._cutter.store.catalog
        if document.state != "unchanged":
            before = {chunk.chunk_id for chunk in catalog.chunks(document.source)}
            catalog.replace_document(
                document.source,
                document.digest,
                self._settings,
                document.chunks,
                size=document.size,
                mtime_ns=document.mtime_ns,
                kind=document.kind,
                collections=self._collections,
            )
            _drop(store, before - self._planned, self._report)  # what moved to a later one stays
        else:
            catalog.note_file(document.source, document.size, document.mtime_ns)
        self._report.documents += 1


def remove_documents(store: ChunkStore, sources: Iterable[str], report: IngestReport) -> None:
    """Takes documents out of the catalog, and the KV that no other document has out of the store.
    Pinned ones stay, and those there are not are passed over."""
    for source in sources:
        known = store.catalog.document(source)
        if known is None or known.pinned:
            continue
        names = {chunk.chunk_id for chunk in store.catalog.chunks(source)}
        store.catalog.remove_document(source)
        report.removed = (*report.removed, source)
        _drop(store, names, report)


def _drop(store: ChunkStore, names: set[str], report: IngestReport) -> None:
    """Removes the KV of chunks that no document has any more."""
    for name in names - store.catalog.known_chunks(names):
        for key in store.keys_of_chunk(name):
            report.dropped_bytes += store.discard(key)
        report.dropped_chunks += 1
