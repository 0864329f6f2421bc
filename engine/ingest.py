"""Documents into the store: cut into chunks, their KV computed, the catalog brought up to date."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_store.catalog import ChunkText
from cache_store.keys import chunk_id, entry_key, group_key
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.chunking import Chunk, split_document
from engine.documents import Document, Skipped, Unreadable
from engine.precompute import OnStored
from engine.prompt import PromptChunk
from engine.tokenizer import Tokenizer

PATIENCE = 30.0  # seconds to wait for another ingest that stores nothing
POLL_SECONDS = 0.05
LATEST = 50  # chunks that a report keeps
CUTTING_VERSION = 1  # raise it when the same text would be cut elsewhere


@dataclass(frozen=True)
class Cutting:
    """How documents are cut; a document cut otherwise counts as changed."""

    chunk_tokens: int = 512
    overlap: int = 0

    def settings(self, tokenizer: Tokenizer) -> str:
        """As the catalog keeps it beside a document."""
        return json.dumps(
            {
                "version": CUTTING_VERSION,
                "chunk_tokens": self.chunk_tokens,
                "overlap": self.overlap,
                "tokenizer": tokenizer.fingerprint,
            }
        )


@dataclass(frozen=True)
class DocumentPlan:
    """A document and its chunks. state: what the catalog has to say of it; size, mtime_ns: of
    its file, as in `Document`."""

    source: str
    digest: str
    state: str  # "new", "changed" or "unchanged"
    chunks: tuple[ChunkText, ...]
    size: int = -1
    mtime_ns: int = 0


@dataclass(frozen=True)
class IngestPlan:
    """What there is to do, known before any KV is computed.

    missing: ids of the chunks whose KV is not in the store; tokens and nbytes are theirs (nbytes
    on disk). held: keys of this ingest's entries that are there already; brought: how many of
    them a remote had.
    """

    documents: tuple[DocumentPlan, ...]
    empty: tuple[str, ...]
    unreadable: tuple[Unreadable, ...]
    skipped: tuple[Skipped, ...]
    missing: frozenset[str]
    tokens: int
    nbytes: int
    held: frozenset[str]
    brought: int = 0

    @property
    def chunk_count(self) -> int:
        return sum(len(document.chunks) for document in self.documents)


@dataclass
class IngestReport:
    """What has been done so far; complete when `run_ingest` returns. Any thread may look.

    computed_bytes: of the computed chunks' entries; latest: ids of the last of them, in order.
    """

    documents: int = 0
    computed_chunks: int = 0
    computed_tokens: int = 0
    computed_bytes: int = 0
    latest: tuple[str, ...] = ()
    dropped_chunks: int = 0
    dropped_bytes: int = 0


@dataclass(frozen=True)
class Cutter:
    """Cuts documents for one model and store; their KV is computed behind `model.chunk_context`."""

    store: ChunkStore
    model: Blueprint
    cutting: Cutting

    def plan(
        self,
        items: Iterable[Document | Unreadable | Skipped],
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> IngestPlan:
        """Cuts every document and looks up what the store holds of it; what a remote has of the
        rest is downloaded. on_bytes: told the bytes of that so far.

        Raises UsageError for a cutting that cannot be, StoreFullError, before any work, where the
        KV of all these chunks cannot be in the store at once.
        """
        documents: dict[str, DocumentPlan] = {}
        empty: list[str] = []
        unreadable: list[Unreadable] = []
        skipped: list[Skipped] = []
        for item in items:
            if isinstance(item, Unreadable):
                unreadable.append(item)
            elif isinstance(item, Skipped):
                skipped.append(item)
            else:
                plan = self._document(item)
                documents[item.source] = plan
                if not plan.chunks:
                    empty.append(item.source)
        return self._with_kv(documents.values(), empty, unreadable, skipped, on_bytes)

    def _document(self, document: Document) -> DocumentPlan:
        known = self.store.catalog.document(document.source)
        settings = self.cutting.settings(self.model.tokenizer)
        same = known and (known.digest, known.settings) == (document.digest, settings)
        kept = self.store.catalog.chunks(document.source) if same else []
        if same and all(chunk_id(c.text) == c.chunk_id for c in kept):
            texts = tuple(ChunkText(c.chunk_id, c.text, c.start, c.end, c.tokens) for c in kept)
            return self._plan(document, "unchanged", texts)
        cut = split_document(
            document.text, self.model.tokenizer, self.cutting.chunk_tokens, self.cutting.overlap
        )
        state = "changed" if known else "new"
        return self._plan(document, state, tuple(map(_chunk_text, cut)))

    @staticmethod
    def _plan(document: Document, state: str, chunks: tuple[ChunkText, ...]) -> DocumentPlan:
        facts = (document.size, document.mtime_ns)
        return DocumentPlan(document.source, document.digest, state, chunks, *facts)

    def _with_kv(
        self,
        documents: Iterable[DocumentPlan],
        empty: Sequence[str],
        unreadable: Sequence[Unreadable],
        skipped: Sequence[Skipped],
        on_bytes: Callable[[int], None],
    ) -> IngestPlan:
        documents = tuple(documents)
        spec, prefix = self.model.spec, self.model.template.prefix
        texts = {chunk.chunk_id: chunk for document in documents for chunk in document.chunks}
        places: dict[str, tuple[str, str]] = {}
        held: set[str] = set()
        for name, chunk in texts.items():
            ids = self.model.tokenizer.encode(chunk.text)
            key = self._held(ids)
            if key is not None:
                held.add(key)
            else:
                places[name] = self._place(ids, self.model.chunk_context)

        def needed() -> int:
            """Bytes of what is still lacking, and the prefix."""
            sizes = [self.predicted_bytes(texts[name].tokens) for name in places]
            return sum(sizes) + self.store.predicted_bytes(spec, len(prefix)) if sizes else 0

        nbytes = needed()
        brought: set[str] = set()
        if places:
            self.store.require_room(nbytes, keep=held)
            wanted = [*places.values()]
            if prefix:
                wanted.insert(0, self._place(prefix, ()))
            brought = self.store.bring(wanted, on_bytes) & {key for _, key in places.values()}
            held |= brought
            places = {name: place for name, place in places.items() if place[1] not in brought}
            nbytes = needed()
        tokens = sum(texts[name].tokens for name in places)
        return IngestPlan(
            documents,
            tuple(empty),
            tuple(unreadable),
            tuple(skipped),
            frozenset(places),
            tokens,
            nbytes,
            frozenset(held),
            len(brought),
        )

    def _place(self, token_ids: Sequence[int], context: Sequence[int]) -> tuple[str, str]:
        """Group and key of an entry, in the right regime."""
        group = group_key(self.model.spec, token_ids)
        regime = self.model.regime(len(context) + len(token_ids))
        return group, entry_key(group, context, regime)

    def _held(self, token_ids: Sequence[int]) -> str | None:
        """Key of the entry computed behind this very context, in the right regime."""
        context = self.model.chunk_context
        regime = self.model.regime(len(context) + len(token_ids))
        match = self.store.find(self.model.spec, token_ids, context, regime=regime)
        if match is None or not match.exact:
            return None
        self.store.protect(match.key)  # and then see that nobody removed it before
        return match.key if self.store.has_entry(match.key) else None

    def predicted_bytes(self, tokens: int) -> int:
        """Bytes on disk of a chunk's entry."""
        return self.store.predicted_bytes(self.model.spec, tokens, len(self.model.chunk_context))

    def key(self, token_ids: Sequence[int]) -> str:
        """Key that a chunk's entry has, or will have."""
        context = self.model.chunk_context
        regime = self.model.regime(len(context) + len(token_ids))
        return entry_key(group_key(self.model.spec, token_ids), context, regime)


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
) -> None:
    """Computes what is missing, and keeps `report` up to date.

    A document enters the catalog once all its chunks are stored, and those before it are in, so
    that stopping at any moment leaves a good store and the next run goes on from there. Chunks that
    a changed document no longer has, and no other document has, are dropped. on_tokens gets the
    tokens computed so far, in whichever thread stores them. make_writer is called only where there
    is something to compute. Raises StoreFullError.
    """
    for key in plan.held:
        cutter.store.protect(key)
    ledger = _Ledger(plan, cutter, report, on_tokens)
    if not plan.missing:
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
    ) -> None:
        self._plan, self._cutter, self._report = plan, cutter, report
        self._on_tokens = on_tokens
        self._settings = cutter.cutting.settings(cutter.model.tokenizer)
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
            )
            _drop(store, before - self._planned, self._report)  # what moved to a later one stays
        else:
            catalog.note_file(document.source, document.size, document.mtime_ns)
        self._report.documents += 1


def _drop(store: ChunkStore, names: set[str], report: IngestReport) -> None:
    """Removes the KV of chunks that no document has any more."""
    for name in names - store.catalog.known_chunks(names):
        for key in store.keys_of_chunk(name):
            report.dropped_bytes += store.discard(key)
        report.dropped_chunks += 1


def _chunk_text(chunk: Chunk) -> ChunkText:
    return ChunkText(chunk_id(chunk.text), chunk.text, chunk.start, chunk.end, len(chunk.token_ids))
