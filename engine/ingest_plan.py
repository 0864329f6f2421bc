"""What an ingest has to do: documents cut into chunks, and what of them the store has already."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache_store.catalog import ChunkText
from cache_store.checking import Checked, check_entries
from cache_store.entry import predicted_file_bytes
from cache_store.keys import chunk_id, entry_key, group_key
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.chunking import Chunk, Cutting
from engine.documents import Document, Skipped, Unreadable

PREFIX = ""  # among chunks' ids: what prompts begin with

OnBytes = Callable[[str, int, int | None], None]
"""Told what is going on ("checking", "downloading"), the bytes so far, and of how many if known."""


@dataclass(frozen=True)
class DocumentPlan:
    """A document and its chunks. state: what the catalog has to say of it; size, mtime_ns,
    kind, notes: of its file, as in `Document`."""

    source: str
    digest: str
    state: str  # "new", "changed" or "unchanged"
    chunks: tuple[ChunkText, ...]
    size: int = -1
    mtime_ns: int = 0
    kind: str = "text"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class IngestPlan:
    """What there is to do, known before any KV is computed.

    missing: ids of the chunks whose KV is not in the store; tokens and nbytes are theirs (nbytes
    on disk). held: keys of this ingest's entries that are there already; brought: how many of
    them a remote had. checked: how many entries that were there were read and checked, of
    checked_bytes; damaged: ids of the chunks, `PREFIX` for the prefix, whose entries were there and
    can't be used.
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
    checked: int = 0
    checked_bytes: int = 0
    damaged: frozenset[str] = frozenset()

    @property
    def lacks_prefix(self) -> bool:
        """Whether the prefix's own KV was damaged: computed again, if it isn't there now."""
        return PREFIX in self.damaged

    @property
    def chunk_count(self) -> int:
        return sum(len(document.chunks) for document in self.documents)


@dataclass
class _There:
    """What is known, while documents are cut, of their chunks' KV. tokens: by chunk id, of all of
    them; held: by the entry's key, the chunk's id; lacking: by chunk id, group and key, nbytes
    theirs; damaged: ids of the chunks whose entries can't be used."""

    tokens: dict[str, int] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, tuple[str, str]] = field(default_factory=dict)
    nbytes: int = 0
    damaged: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Cutter:
    """Cuts documents for one model and store; their KV is computed behind `model.chunk_context`.

    check: entries that are there already are read, every byte of them; without it, their headers.
    """

    store: ChunkStore
    model: Blueprint
    cutting: Cutting
    check: bool = True

    def plan(
        self,
        items: Iterable[Document | Unreadable | Skipped],
        on_bytes: OnBytes = lambda what, done, total: None,
    ) -> IngestPlan:
        """Cuts every document and looks up what the store holds of it. What is damaged of that is
        removed, and counts as missing; what a remote has of the missing is downloaded. on_bytes:
        told, of each of the two, the bytes so far.

        Raises UsageError for a cutting that cannot be, StoreFullError, before any work, where the
        KV of all these chunks cannot be in the store at once.
        """
        documents: dict[str, DocumentPlan] = {}
        empty: list[str] = []
        unreadable: list[Unreadable] = []
        skipped: list[Skipped] = []
        there = _There()
        for item in items:
            if isinstance(item, Unreadable):
                unreadable.append(item)
            elif isinstance(item, Skipped):
                skipped.append(item)
            else:
                plan = self._document(item, there)
                documents[item.source] = plan
                if not plan.chunks:
                    empty.append(item.source)
        facts = tuple(empty), tuple(unreadable), tuple(skipped)
        return self._with_kv(tuple(documents.values()), facts, there, on_bytes)

    def _document(self, document: Document, there: _There) -> DocumentPlan:
        """Cuts a document, and looks up its chunks' KV while their ids are at hand."""
        catalog, tokenizer = self.store.catalog, self.model.tokenizer
        known = catalog.document(document.source)
        same = known and (known.digest, known.settings, known.kind) == (
            *(document.digest, self.cutting.record(tokenizer.fingerprint), document.kind),
        )
        kept = catalog.chunks(document.source) if same else []
        limit = self.store.limit
        chunks: list[ChunkText] = []
        if same and all(chunk_id(c.text) == c.chunk_id for c in kept):
            state = "unchanged"
            for c in kept:
                facts = c.chunk_id, c.text, c.start, c.end, c.tokens, c.place, c.headings
                chunks.append(ChunkText(*facts))
                if c.chunk_id not in there.tokens:
                    self._look_up(c.chunk_id, tokenizer.encode(c.text), there)
        else:
            state = "changed" if known else "new"
            for chunk in self.cutting.cut(document, tokenizer):
                text = _chunk_text(chunk)
                if text.chunk_id not in there.tokens:
                    self._look_up(text.chunk_id, chunk.token_ids, there)
                if there.nbytes > limit:  # it will be refused; how much is still told
                    text = replace(text, text="")
                chunks.append(text)
        facts_of_file = document.size, document.mtime_ns, document.kind, document.notes
        return DocumentPlan(document.source, document.digest, state, tuple(chunks), *facts_of_file)

    def _look_up(self, name: str, ids: Sequence[int], there: _There) -> None:
        """Whether the store has the KV of a chunk."""
        there.tokens[name] = len(ids)
        context = self.model.chunk_context
        if self._is_found(ids, context):
            there.held[self.key(ids)] = name
            return
        place = self._place(ids, context)
        if self.store.has_entry(place[1]):  # and what is wrong with it was told
            there.damaged.add(name)
        if self.store.relist(place[1]):  # it could only not be found
            there.held[place[1]] = name
        else:
            there.lacking[name] = place
            there.nbytes += self.predicted_bytes(len(ids))

    def _with_kv(
        self,
        documents: tuple[DocumentPlan, ...],
        facts: tuple[tuple[str, ...], tuple[Unreadable, ...], tuple[Skipped, ...]],
        there: _There,
        on_bytes: OnBytes,
    ) -> IngestPlan:
        spec, prefix = self.model.spec, self.model.template.prefix
        places, held, damaged = there.lacking, there.held, there.damaged
        prefix_key = self._place(prefix, ())[1] if prefix else ""
        if prefix and self.store.has_entry(prefix_key):
            if not self._is_found(prefix, ()):
                damaged.add(PREFIX)
            if PREFIX not in damaged or self.store.relist(prefix_key):
                held[prefix_key] = PREFIX
        protected = self.store.protected(held)
        gone = {key for key in held if key not in protected}
        checked = self._check(
            {k: n for k, n in held.items() if k in protected}, there.tokens, on_bytes
        )
        damaged |= {held[key] for key in checked.damaged}
        lost = {held.pop(key) for key in (*gone, *checked.damaged)}
        for chunk in (chunk for document in documents for chunk in document.chunks):
            if chunk.chunk_id in lost:
                ids = self.model.tokenizer.encode(chunk.text)
                places[chunk.chunk_id] = self._place(ids, self.model.chunk_context)

        def needed() -> int:
            """Bytes of what is still lacking, and the prefix."""
            sizes = [self.predicted_bytes(there.tokens[name]) for name in places]
            return sum(sizes) + self.store.predicted_bytes(spec, len(prefix)) if sizes else 0

        nbytes = needed()
        brought: set[str] = set()
        kept = set(held)
        if places:
            self.store.require_room(nbytes, keep=kept)
            wanted = [*places.values()]
            if prefix:
                wanted.insert(0, self._place(prefix, ()))
            found = self.store.bring(wanted, lambda done: on_bytes("downloading", done, None))
            brought = found & {key for _, key in places.values()}
            kept |= brought
            places = {name: place for name, place in places.items() if place[1] not in brought}
            nbytes = needed()
        return IngestPlan(
            documents,
            *facts,
            frozenset(places),
            sum(there.tokens[name] for name in places),
            nbytes,
            frozenset(kept),
            len(brought),
            checked.entries,
            checked.nbytes,
            frozenset(damaged),
        )

    def _check(
        self, held: Mapping[str, str], tokens: Mapping[str, int], on_bytes: OnBytes
    ) -> Checked:
        """Reads entries, given with their chunks' ids; the damaged ones are removed."""
        if not self.check:
            return Checked(0, 0, {})
        spec, context = self.model.spec, len(self.model.chunk_context)
        total = sum(
            predicted_file_bytes(spec, tokens[name], context, chunk_id=name)
            for name in held.values()
            if name != PREFIX
        )
        found = check_entries(self.store, held, lambda done: on_bytes("checking", done, total))
        for key, what in found.damaged.items():
            self.store.discard_damaged(key)
            self.store.damaged.append(what)
        return found

    def _place(self, token_ids: Sequence[int], context: Sequence[int]) -> tuple[str, str]:
        """Group and key of an entry, in the right regime."""
        group = group_key(self.model.spec, token_ids)
        regime = self.model.regime(len(context) + len(token_ids))
        return group, entry_key(group, context, regime)

    def _is_found(self, token_ids: Sequence[int], context: Sequence[int]) -> bool:
        """Whether the store has the entry computed behind this very context, in the right regime,
        its header sound."""
        regime = self.model.regime(len(context) + len(token_ids))
        match = self.store.find(self.model.spec, token_ids, context, regime=regime)
        return match is not None and match.exact and self.store.has_entry(match.key)

    def predicted_bytes(self, tokens: int) -> int:
        """Bytes on disk of a chunk's entry."""
        return self.store.predicted_bytes(self.model.spec, tokens, len(self.model.chunk_context))

    def key(self, token_ids: Sequence[int]) -> str:
        """Key that a chunk's entry has, or will have."""
        context = self.model.chunk_context
        regime = self.model.regime(len(context) + len(token_ids))
        return entry_key(group_key(self.model.spec, token_ids), context, regime)


def _chunk_text(chunk: Chunk) -> ChunkText:
    return ChunkText(
        *(chunk.chunk_id, chunk.text, chunk.start, chunk.end, len(chunk.token_ids)),
        *(chunk.place, chunk.headings),
    )
