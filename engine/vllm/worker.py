"""One vLLM worker's part: blends into its blocks, and stores chunks that were missing."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from cache_store.keys import KVSpec
from engine.blend import Blended, Ending, blend
from engine.codec import Codec
from engine.kv_cache import KVCache
from engine.loaders import DamagedSource, LayerLoader, make_loader
from engine.model import Decoder
from engine.options import BlendOptions
from engine.precompute import ChunkWriter
from engine.prompt import PromptChunk
from engine.sources import KVStore, Source
from engine.stages import question_layers
from engine.timing import Stopwatch, synchronize
from engine.vllm.lockstep import LostSources, together
from engine.vllm.paged import PagedKV
from engine.vllm.plan import BlendPlan, SavePlan
from engine.vllm.saving import save_missing


@dataclass(frozen=True)
class BlendRun:
    """What became of one plan. sources: as used; an entry that was lost meanwhile is a miss."""

    plan: BlendPlan
    sources: tuple[Source, ...]
    blended: Blended
    watch: Stopwatch
    bytes_loaded: int
    tiers: dict[str, int]
    seconds: float

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        if self.sources == self.plan.sources:
            return ()
        return ("stored KV was damaged or lost meanwhile: left out and computed instead",)


class BlendWorker:
    """Carries out plans on one worker's model, store and blocks."""

    def __init__(self, model: Decoder, store: KVStore, spec: KVSpec, paged: PagedKV) -> None:
        self.model, self.store, self.spec, self.paged = model, store, spec, paged
        self._codec = Codec.of(spec, model.dtype)
        self._writer: ChunkWriter | None = None  # of the last save, with its context's KV

    @torch.inference_mode()
    def blend(self, plan: BlendPlan) -> BlendRun:
        """Brings a request's KV, up to its last chunk's end, into its blocks.

        An entry that turns out damaged or gone, on any rank, is dropped and computed instead.
        Whatever else goes wrong is raised on all ranks.
        """
        self._writer, sources = None, plan.sources  # room for what is staged
        while True:
            try:
                return self._blend_once(plan, sources)
            except DamagedSource as error:
                lost = {error.key: error.lost}
            except LostSources as error:
                lost = error.entries
            together(self.model.ranks, lambda: None)  # none holds them any more
            together(self.model.ranks, partial(self._discard, lost))
            for key in lost:
                sources = tuple(_without(source, key) for source in sources)

    def _blend_once(self, plan: BlendPlan, sources: tuple[Source, ...]) -> BlendRun:
        began, watch = time.perf_counter(), Stopwatch()
        request, model = plan.request, self.model
        passing = not question_layers(request.options, sources, model.config.layers)
        prompt, end = request.prompt, request.end
        ids, suffix = prompt.token_ids, len(prompt.segments[-1].token_ids)
        question = suffix if request.question_tokens is None else request.question_tokens
        capacity = end + question
        tables = model.rope.tables(len(ids), capacity)
        with ExitStack() as stack:

            def prepare() -> tuple[LayerLoader, KVCache, torch.Tensor]:
                stack.enter_context(self.pinned(sources))
                loader = self.loader(request.options, sources, watch)
                slots = self.paged.slots(plan.block_ids, plan.held, end)
                # Each layer is used in its turn alone, unless the question reads all of them first.
                cache = model.new_cache(capacity, passing=passing)
                return stack.enter_context(loader), cache, slots

            loader, cache, slots = together(model.ranks, prepare)

            def write(layer: int) -> None:
                if len(slots):
                    self.paged.write(layer, cache, plan.held, slots)

            def compute() -> Blended:
                return blend(
                    *(model, ids[:capacity], sources, loader, request.options),
                    *(cache, tables, watch, Ending(question, write)),
                )

            blended = together(model.ranks, compute, loader.troubles)
            loaded, tiers = loader.bytes_loaded, loader.tiers
        synchronize(model.device)
        seconds = time.perf_counter() - began
        return BlendRun(plan, sources, blended, watch, loaded, dict(tiers), seconds)

    def pinned(self, sources: Sequence[Source]) -> AbstractContextManager[object]:
        """Within, what the sources come from is not evicted."""
        return self.store.pinned([s.match.key for s in sources if s.match is not None])

    def loader(
        self, options: BlendOptions, sources: Sequence[Source], watch: Stopwatch
    ) -> LayerLoader:
        """What brings the sources' stored KV; to be closed."""
        return make_loader(options.loader, self.model, self.store, sources, watch, self._codec)

    def _discard(self, lost: Mapping[str, bool]) -> None:
        """Drops damaged entries from the store."""
        for key, elsewhere in lost.items():
            if not elsewhere and self.model.ranks.leads:
                self.store.discard(key)

    def save(self, plan: SavePlan) -> int:
        """Computes and stores chunks that are not there yet; counts them."""
        context = plan.prefix if plan.context is None else plan.context
        writer, self._writer = self._writer, None  # None, too, where it fails
        there = writer and (writer.store, writer.context, writer.prefix)
        if writer is None or there != (self.store, context, plan.prefix):
            writer = ChunkWriter(self.model, self.store, self.spec, context, plan.prefix)
        chunks = [PromptChunk(ids, chunk_id) for ids, chunk_id in plan.chunks]
        saved = save_missing(writer, chunks)
        self._writer = writer
        return saved

    def agreed(self, yes: bool) -> bool:
        """What rank 0 says, whatever the others do."""
        return bool(self.model.ranks.exchanged("yes" if yes else "")[0])


def _without(source: Source, key: str) -> Source:
    """What becomes of a source whose entry is lost."""
    if source.match is None or source.match.key != key:
        return source
    chunk = source.segment.kind == "chunk"
    return replace(source, status="miss" if chunk else "computed", match=None)
