"""What is stored of a prompt: looked up at once, or by a thread where a remote is asked too."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cache_store.errors import StoreFullError
from cache_store.keys import KVSpec, group_key
from engine.rope import Rope
from engine.sources import FindsKV, KVStore, Source, find_sources
from engine.vllm.plan import RequestPlan

Found = Future[tuple[Source, ...]]


class Lookups:
    """Looks prompts up, one after the other.

    store: tells the store, which may be changed. background: a lookup may wait for a network, and
    every request of the engine with it; so a thread does it, but for prompts of which all is here:
    these wait for nobody else's.
    """

    def __init__(
        self, store: Callable[[], KVStore], spec: KVSpec, rope: Rope, *, background: bool
    ) -> None:
        self._store, self._spec, self._rope = store, spec, rope
        self._pool = ThreadPoolExecutor(1, "cacheblend-lookup") if background else None

    @property
    def background(self) -> bool:
        return self._pool is not None

    def begin(self, plan: RequestPlan) -> Found:
        """One source a segment; done already where that takes no thread."""
        found: Found = Future()
        try:
            if self._pool is None:
                found.set_result(self._find(plan))
                return found
            here = self._sources(plan, _Here(self._store()))
            if any(s.match is None for s in here if s.segment.kind in ("prefix", "chunk")):
                return self._pool.submit(self._find, plan)
            found.set_result(here)
        except Exception as error:
            found.set_exception(error)
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, plan: RequestPlan) -> tuple[Source, ...]:
        store, segments = self._store(), plan.prompt.segments
        chunks = [s.token_ids for s in segments if s.kind in ("prefix", "chunk")]
        store.look_ahead(self._spec, chunks)
        sources = self._sources(plan, store)
        return self._brought(store, sources) if self._pool is not None else sources

    def _sources(self, plan: RequestPlan, store: FindsKV) -> tuple[Source, ...]:
        prompt, options = plan.prompt, plan.options
        regime = self._rope.regime(len(prompt.token_ids))
        return find_sources(
            *(prompt, store, self._spec, regime, options.mode, options.strict_context)
        )

    def _brought(self, store: KVStore, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        """What only the remote has is downloaded: workers read it from the local disk, as fast as
        everything else. What doesn't come is computed."""
        places = [
            (group_key(self._spec, s.segment.token_ids), s.match.key) for s in sources if s.match
        ]
        try:
            here = store.bring(places)
        except StoreFullError:
            return sources  # a worker finds out what there is
        return tuple(
            s if s.match is None or s.match.key in here else _without_kv(s) for s in sources
        )


class _Here:
    """A store as far as it is on this machine."""

    def __init__(self, store: KVStore) -> None:
        self.find = store.find_here


def _without_kv(source: Source) -> Source:
    return Source(source.segment, "miss" if source.segment.kind == "chunk" else "computed")
