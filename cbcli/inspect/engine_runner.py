"""The runner with the store and the model that the settings name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from cbcli.calibrated import Calibrated, PromptTokens
from cbcli.flags import Options
from cbcli.inspect.runner import StoredChunk, Wish
from cbcli.output import Output
from cbcli.session import (
    blend_options,
    load_engine,
    open_blueprint,
    open_existing_store,
    sampling_options,
)
from cbcli.settings import Settings, load_settings
from cbcli.traces import Tracing
from engine.trace.record import Trace

if TYPE_CHECKING:
    from engine.base import BaseEngine


class EngineRunner:
    """Opens the store and loads the model when they are first needed, and keeps them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._store: ChunkStore | None = None
        self._engine: BaseEngine | None = None
        self._context = ""

    def _settings(self, wish: Wish | None = None) -> Settings:
        wanted = dict(self._options)
        if wish is not None:
            wanted |= {
                "ratio": f"{wish.ratio:g}",
                "policy": wish.policy,
                "check_layers": str(wish.check_layer),
                "context": wish.context,
            }
        return load_settings(wanted)

    def _open(self) -> ChunkStore:
        if self._store is None:
            self._store = open_existing_store(self._settings())
        return self._store

    def chunks(self) -> Sequence[StoredChunk]:
        store = self._open()
        sizes: dict[str, int] = defaultdict(int)
        hits: dict[str, int] = defaultdict(int)
        for entry in store.entries():
            sizes[entry.chunk_id] += entry.nbytes
            hits[entry.chunk_id] += entry.hits
        return [
            StoredChunk(
                chunk.chunk_id,
                chunk.source,
                chunk.ordinal,
                chunk.tokens,
                sizes[chunk.chunk_id],
                hits[chunk.chunk_id],
                chunk.text,
            )
            for chunk in store.catalog.chunks(collections=self._settings().collections)
        ]

    def run(self, wish: Wish, say: Callable[[str], None]) -> Trace:
        from cbcli.chooser import Chooser

        settings = self._settings(wish)
        say("opening the store")
        store = self._open()
        chunks = Chooser(store).choose(settings, wish.question, list(wish.chunks))
        engine = self._load(settings, store, say)
        cached = sum(chunk.tokens for chunk in chunks)
        prefix = len(engine.template.prefix)
        length = prefix + cached + len(engine.template.suffix(wish.question))
        calibrated = Calibrated.open(engine.blueprint, Output(quiet=True), store)
        settings = calibrated.settle(settings, PromptTokens(length, cached, prefix))
        blend = blend_options(settings)
        blend.check_model(engine.blueprint.config.layers)
        tracing = Tracing(settings, None)
        tokens = 0

        def piece(_: str) -> None:
            nonlocal tokens
            tokens += 1
            say(f"answering, {tokens} tokens")

        say("prefilling" + (", and a full prefill to compare with" if wish.compare else ""))
        result = engine.ask(
            wish.question,
            [engine.chunk(chunk.text, chunk.source) for chunk in chunks],
            blend=blend,
            sampling=sampling_options(settings),
            compare=wish.compare,
            save=settings.save,
            on_text=piece,
            trace=tracing.level or "basic",
            trace_layers=settings.trace_layers,
        )
        if result.trace is None:
            raise CacheblendError("the run was not recorded", "try again")
        tracing.save(result.trace, say)
        return result.trace

    def _load(
        self, settings: Settings, store: ChunkStore, say: Callable[[str], None]
    ) -> BaseEngine:
        """The engine; another context takes another one."""
        if self._engine is None or self._context != settings.context:
            say("loading the model")
            blueprint = open_blueprint(settings, Output(quiet=True))
            self._engine = load_engine(replace(settings, engine="torch"), blueprint, store)
            self._context = settings.context
        return self._engine
