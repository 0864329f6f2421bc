"""Chunk KV from several devices at once: a process each, all into one store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from cache_store.errors import CacheblendError, StoreFullError
from cache_store.keys import DType, KVSpec, entry_key, group_key
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.model import Decoder
from engine.precompute import BATCH_TOKENS, ChunkWriter, OnStored
from engine.prompt import PromptChunk
from engine.threads import set_threads
from engine.workers import Lost, WorkerPool

TASK_TOKENS = 2 * BATCH_TOKENS  # at least two batches, for one to be written beside the other
LEAST_TASK_TOKENS = 1024  # where there is so little that some device would get nothing
AHEAD = 2  # tasks a device, that are at hand


@dataclass(frozen=True)
class WorkerModel:
    """What a worker loads, and where it stores what it computes."""

    folder: Path
    spec: KVSpec
    dtype: DType  # what is computed in
    context: tuple[int, ...]
    prefix: tuple[int, ...]
    store: Path
    threads: int | None
    sharing: int  # workers on this machine's CPU, which divide its cores


@dataclass(frozen=True)
class Task:
    """Chunks to compute. protected: keys that no worker may evict; it only grows."""

    chunks: tuple[PromptChunk, ...]
    protected: Sequence[str]


@dataclass(frozen=True)
class Stored:
    """What became of a task: its chunks' keys, in order, as far as they are stored; the error that
    kept the others from it."""

    keys: tuple[str, ...]
    error: CacheblendError | None = None


class DeviceWriters:
    """As `ChunkWriter`, with the computing shared between devices."""

    def __init__(
        self,
        devices: Sequence[str],
        model: Blueprint,
        store: ChunkStore,
        *,
        tokens: int,
        protected: Iterable[str],
        threads: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """tokens: that are to be computed in all. protected: keys of what must not be evicted.
        threads: of each worker. say: told of workers that were lost."""
        self._devices, self._model, self._store, self._say = devices, model, store, say
        self._protected = list(protected)
        self._task_tokens = min(TASK_TOKENS, max(LEAST_TASK_TOKENS, tokens // (4 * len(devices))))
        self._context = model.chunk_context
        self._worker_model = WorkerModel(
            model.path,
            model.spec,
            model.dtype,
            self._context,
            model.template.prefix,
            store.path.absolute(),
            threads,
            devices.count("cpu"),
        )

    def write_prefix(self) -> str:
        """The key of the prefix's own KV, which every worker sees to before it begins."""
        prefix = self._model.template.prefix
        if not prefix:
            return ""
        return entry_key(group_key(self._model.spec, prefix), (), self._model.regime(len(prefix)))

    def held(self, token_ids: Sequence[int]) -> str | None:
        """As `ChunkWriter.held`."""
        regime = self._model.regime(len(self._context) + len(token_ids))
        if not self._store.contains(self._model.spec, token_ids, self._context, regime):
            return None
        return entry_key(group_key(self._model.spec, token_ids), self._context, regime)

    def write_all(self, chunks: Iterable[PromptChunk], on_stored: OnStored) -> None:
        """Computes and stores chunks, in any order; on_stored is told of each in this thread.

        The work of a worker that dies is done once more, by another. Raises CacheblendError where
        that dies too, and what `ChunkWriter.write_all` raises. What was stored until then, or until
        an interrupt, stays.
        """
        tasks = enumerate(self._tasks(chunks))
        given: dict[int, tuple[PromptChunk, ...]] = {}
        written: dict[str, str] = {}

        def settle(ticket: int, keys: Iterable[str | None]) -> None:
            for chunk, key in zip(given.pop(ticket), keys, strict=False):
                if key is not None:
                    self._protected.append(key)
                    written[key] = chunk.chunk_id or ""
                    self._store.announce([key])
                    on_stored(chunk, key)

        start = partial(writer_on, self._worker_model)
        try:
            with WorkerPool[Task, Stored](self._devices, start, self._say) as pool:
                while True:
                    for ticket, some in islice(tasks, AHEAD * len(self._devices) - len(given)):
                        given[ticket] = some
                        pool.submit(ticket, Task(some, self._protected))
                    if not given:
                        break
                    for finished in pool.wait()[0]:
                        if isinstance(finished, Lost):
                            raise CacheblendError(
                                f"{len(given[finished.ticket])} chunks could not be computed: "
                                f"{finished.reason}",
                                "run the same command again to go on from there",
                            )
                        settle(finished.ticket, finished.result.keys)
                        if finished.result.error is not None:
                            raise finished.result.error
        finally:  # of what was under way some may have been stored
            for ticket in list(given):
                settle(ticket, [self.held(chunk.token_ids) for chunk in given[ticket]])
        self._check(written)

    def _check(self, written: Mapping[str, str]) -> None:
        """Raises StoreFullError where a worker had no room but that of what another had written a
        moment before, as when the limit is lowered meanwhile. written: chunk ids by key."""
        lost = sum(key not in self._store.keys_of_chunk(name) for key, name in written.items())
        if lost:
            raise StoreFullError(
                f"the store at {self._store.path} is full: its limit is {self._store.limit} bytes, "
                f"and {lost} of the chunks that were computed had to make room for others",
                "set a larger limit: cacheblend store limit SIZE",
            )

    def _tasks(self, chunks: Iterable[PromptChunk]) -> Iterator[tuple[PromptChunk, ...]]:
        some: list[PromptChunk] = []
        tokens = 0
        for chunk in chunks:
            if some and tokens + len(chunk.token_ids) > self._task_tokens:
                yield tuple(some)
                some, tokens = [], 0
            some.append(chunk)
            tokens += len(chunk.token_ids)
        if some:
            yield tuple(some)


@contextmanager
def writer_on(model: WorkerModel, device: str) -> Iterator[Callable[[Task], Stored]]:
    """In a worker's process: what does its tasks on `device`."""
    set_threads(model.threads, model.sharing if device == "cpu" else 1)
    try:
        decoder = Decoder.load(model.folder, device, model.dtype)
    except (OSError, RuntimeError, MemoryError) as error:  # no memory left for it, above all
        raise CacheblendError(f"{device}: the model could not be loaded: {error}") from error
    with ChunkStore.open(model.store) as store:
        writer = ChunkWriter(decoder, store, model.spec, model.context, model.prefix)
        store.protect(writer.write_prefix())
        protected = 0

        def work(task: Task) -> Stored:
            nonlocal protected
            for key in task.protected[protected:]:
                store.protect(key)
            protected = len(task.protected)
            keys: list[str] = []

            def stored(chunk: PromptChunk, key: str) -> None:
                store.protect(key)
                keys.append(key)

            try:
                writer.write_all(task.chunks, stored)
            except CacheblendError as error:
                return Stored(tuple(keys), error)
            return Stored(tuple(keys))

        yield work
