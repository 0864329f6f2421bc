"""What an ingest has to do: documents cut into chunks, and what of them the store has already."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache_store.catalog import ChunkText
from cache_store.checking import Checked, check_entries
from cache_store.entry import predicted_file_bytes
from cache_store.keys import chunk_id, entry_key, group_key
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.chunking import Chunk, split_document
from engine.documents import Document, Skipped, Unreadable
from engine.tokenizer import Tokenizer

PREFIX = ""  # among chunks' ids: what prompts begin with
CUTTING_VERSION = 1  # raise it when the same text would be cut elsewhere

OnBytes = Callable[[str, int, int | None], None]
"""Told what is going on ("checking", "downloading"), the bytes so far, and of how many if known."""


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
            texts = tuple(
                ChunkText(c.chunk_id, c.text, c.start, c.end, c.tokens, c.place, c.headings)
                for c in kept
            )
            return self._plan(document, "unchanged", texts)
        cut = split_document(
            document.text, self.model.tokenizer, self.cutting.chunk_tokens, self.cutting.overlap
        )
        state = "changed" if known else "new"
        return self._plan(document, state, tuple(map(_chunk_text, cut)))

    @staticmethod
    def _plan(document: Document, state: str, chunks: tuple[ChunkText, ...]) -> DocumentPlan:
        facts = (document.size, document.mtime_ns, document.kind, document.notes)
        return DocumentPlan(document.source, document.digest, state, chunks, *facts)

    def _with_kv(
        self,
        documents: Iterable[DocumentPlan],
        empty: Sequence[str],
        unreadable: Sequence[Unreadable],
        skipped: Sequence[Skipped],
        on_bytes: OnBytes,
    ) -> IngestPlan:
        documents = tuple(documents)
        spec, prefix = self.model.spec, self.model.template.prefix
        context = self.model.chunk_context
        texts = {chunk.chunk_id: chunk for document in documents for chunk in document.chunks}
        places: dict[str, tuple[str, str]] = {}
        held: dict[str, str] = {}  # by the entry's key, the chunk's id
        damaged: set[str] = set()
        for name, chunk in texts.items():
            ids = self.model.tokenizer.encode(chunk.text)
            if self._is_found(ids, context):
                held[self.key(ids)] = name
                continue
            place = self._place(ids, context)
            if self.store.has_entry(place[1]):  # and what is wrong with it was told
                damaged.add(name)
            if self.store.relist(place[1]):  # it could only not be found
                held[place[1]] = name
            else:
                places[name] = place
        prefix_key = self._place(prefix, ())[1] if prefix else ""
        if prefix and self.store.has_entry(prefix_key):
            if not self._is_found(prefix, ()):
                damaged.add(PREFIX)
            if PREFIX not in damaged or self.store.relist(prefix_key):
                held[prefix_key] = PREFIX
        there = self.store.protected(held)
        gone = {key for key in held if key not in there}
        checked = self._check({k: n for k, n in held.items() if k in there}, texts, on_bytes)
        damaged |= {held[key] for key in checked.damaged}
        for key in (*gone, *checked.damaged):
            name = held.pop(key)
            if name != PREFIX:
                ids = self.model.tokenizer.encode(texts[name].text)
                places[name] = self._place(ids, context)

        def needed() -> int:
            """Bytes of what is still lacking, and the prefix."""
            sizes = [self.predicted_bytes(texts[name].tokens) for name in places]
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
        tokens = sum(texts[name].tokens for name in places)
        return IngestPlan(
            documents,
            tuple(empty),
            tuple(unreadable),
            tuple(skipped),
            frozenset(places),
            tokens,
            nbytes,
            frozenset(kept),
            len(brought),
            checked.entries,
            checked.nbytes,
            frozenset(damaged),
        )

    def _check(
        self, held: Mapping[str, str], texts: Mapping[str, ChunkText], on_bytes: OnBytes
    ) -> Checked:
        """Reads entries, given with their chunks' ids; the damaged ones are removed."""
        if not self.check:
            return Checked(0, 0, {})
        spec, context = self.model.spec, len(self.model.chunk_context)
        total = sum(
            predicted_file_bytes(spec, texts[name].tokens, context, chunk_id=name)
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
