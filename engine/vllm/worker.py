"""One vLLM worker's part: blends into its blocks, and stores chunks that were missing."""

import time
from dataclasses import dataclass, replace

import torch

from cache_store.keys import KVSpec
from engine.blend import Blended, Ending, blend
from engine.codec import Codec
from engine.loaders import DamagedSource, make_loader
from engine.model import Decoder
from engine.precompute import ChunkWriter
from engine.prompt import PromptChunk
from engine.sources import KVStore, Source
from engine.timing import Stopwatch, synchronize
from engine.vllm.paged import PagedKV
from engine.vllm.plan import BlendPlan, SavePlan


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


class BlendWorker:
    """Carries out plans on one worker's model, store and blocks."""

    def __init__(self, model: Decoder, store: KVStore, spec: KVSpec, paged: PagedKV) -> None:
        self.model, self.store, self.spec, self.paged = model, store, spec, paged
        self._codec = Codec.of(spec, model.dtype)

    @torch.inference_mode()
    def blend(self, plan: BlendPlan) -> BlendRun:
        """Brings a request's KV, up to its last chunk's end, into its blocks.

        An entry that turns out damaged or gone is dropped and computed instead.
        """
        sources = plan.sources
        while True:
            try:
                return self._blend_once(plan, sources)
            except DamagedSource as error:
                if not error.lost:
                    self.store.discard(error.key)
                sources = tuple(_without(source, error.key) for source in sources)

    def _blend_once(self, plan: BlendPlan, sources: tuple[Source, ...]) -> BlendRun:
        began, watch = time.perf_counter(), Stopwatch()
        request, model = plan.request, self.model
        prompt, end = request.prompt, request.end
        ids, suffix = prompt.token_ids, len(prompt.segments[-1].token_ids)
        question = suffix if request.question_tokens is None else request.question_tokens
        capacity = end + question
        cache, tables = model.new_cache(capacity), model.rope.tables(len(ids), capacity)
        slots = self.paged.slots(plan.block_ids, plan.held, end)

        def write(layer: int) -> None:
            if len(slots):
                self.paged.write(layer, cache, plan.held, slots)

        keys = [s.match.key for s in sources if s.match is not None]
        with (
            self.store.pinned(keys),
            make_loader(
                *(request.options.loader, model, self.store, sources, watch, self._codec)
            ) as loader,
        ):
            blended = blend(
                *(model, ids[:capacity], sources, loader, request.options, cache, tables, watch),
                Ending(question, write),
            )
            loaded, tiers = loader.bytes_loaded, loader.tiers
        synchronize(model.device)
        seconds = time.perf_counter() - began
        return BlendRun(plan, sources, blended, watch, loaded, dict(tiers), seconds)

    def save(self, plan: SavePlan) -> int:
        """Computes and stores chunks that are not there yet; counts them."""
        context = plan.prefix if plan.context is None else plan.context
        writer = ChunkWriter(self.model, self.store, self.spec, context, plan.prefix)
        chunks = [PromptChunk(ids, chunk_id) for ids, chunk_id in plan.chunks]
        return writer.write_missing(chunks, saved=True)


def _without(source: Source, key: str) -> Source:
    """What becomes of a source whose entry is lost."""
    if source.match is None or source.match.key != key:
        return source
    chunk = source.segment.kind == "chunk"
    return replace(source, status="miss" if chunk else "computed", match=None)
