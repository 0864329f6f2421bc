"""Makes chunks ready to be used: fetched or computed where they are missing, read where not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cache_store.errors import DamagedEntry, NotFoundError, UnreadableEntry
from cache_store.keys import entry_key, group_key
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.ingest import ChunkComputer
from engine.prompt import PromptChunk


@dataclass
class WarmReport:
    """Entries: read from the local disk, fetched from the remote, computed; nbytes: of those read.
    damaged: those that couldn't be read, which were computed again."""

    read: int = 0
    nbytes: int = 0
    fetched: int = 0
    computed: int = 0
    damaged: int = 0


class Warming:
    """Chunks to be made ready for one model. Made, it knows which are missing.

    texts: of the chunks, by their ids. on_bytes: told the bytes that were fetched so far.
    """

    def __init__(
        self,
        store: ChunkStore,
        model: Blueprint,
        texts: Iterable[tuple[str, str]],
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.report = WarmReport()
        self._store = store
        self._chunks: dict[str, PromptChunk] = {}  # by the key of the entry that is wanted
        wanted = []
        context = model.chunk_context
        for name, text in dict(texts).items():
            ids = tuple(model.tokenizer.encode(text))
            group = group_key(model.spec, ids)
            key = entry_key(group, context, model.regime(len(context) + len(ids)))
            self._chunks[key] = PromptChunk(ids, name)
            wanted.append((group, key))
        before = {key for key in self._chunks if store.header(key) is not None}
        here = set(store.bring(wanted, on_bytes))
        self.report.fetched = len(here - before)
        self._here = [key for key in self._chunks if key in here]
        self.missing = [chunk for key, chunk in self._chunks.items() if key not in here]

    @property
    def present_bytes(self) -> int:
        """Bytes that there are to read."""
        headers = map(self._store.header, self._here)
        return sum(header.file_bytes for header in headers if header is not None)

    def read(self, on_bytes: Callable[[int], None]) -> None:
        """Reads and checks what is there, so that it is in the page cache; what is damaged is
        dropped and counts as missing."""
        for key in self._here:
            damaged = False
            try:
                with self._store.peek(key) as reader:
                    reader.verify()
                    self.report.nbytes += len(reader.file)
                self.report.read += 1
            except (NotFoundError, UnreadableEntry):  # evicted just now, or not for us
                self.missing.append(self._chunks[key])
            except DamagedEntry:
                damaged = True
            if damaged:  # the error no longer holds the entry: one in use is not discarded
                self._store.discard(key)
                self.report.damaged += 1
                self.missing.append(self._chunks[key])
            on_bytes(self.report.nbytes)

    def require_room(self, model: Blueprint) -> None:
        """Raises UsageError for a store that can't be written, StoreFullError where what is
        missing doesn't fit beside the rest of the chunks."""
        if not self.missing:
            return
        self._store.require_writable()
        context = len(model.chunk_context)
        sizes = (
            self._store.predicted_bytes(model.spec, len(chunk.token_ids), context)
            for chunk in self.missing
        )
        self._store.require_room(sum(sizes), keep=self._here)
        for key in self._here:
            self._store.protect(key)

    def compute(self, writer: ChunkComputer, on_tokens: Callable[[int], None]) -> None:
        """Computes and stores what is missing."""
        done = 0

        def stored(chunk: PromptChunk, key: str) -> None:
            nonlocal done
            self._store.protect(key)
            self.report.computed += 1
            on_tokens(done := done + len(chunk.token_ids))

        self._store.protect(writer.write_prefix())
        writer.write_all(self.missing, stored)
