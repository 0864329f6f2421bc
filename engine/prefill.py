"""A prompt brought to its first output token: full, from exact KV, reused or blended."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from cache_store.errors import UsageError
from cache_store.keys import KVSpec
from engine.blend import Blended, Looks, blend
from engine.codec import Codec
from engine.forward import forward
from engine.kv_cache import KVCache
from engine.loaders import DamagedSource, make_loader
from engine.model import Decoder
from engine.observer import Observer
from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.rope import Tables
from engine.sources import KVStore, Source, find_sources
from engine.timing import Stopwatch, synchronize


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    """What became of a prompt on its way to its first output token's logits, float32 [1, vocab].

    sources: where each segment's KV was found; used: what became of it (a skipped blend computes
    everything). tiers: bytes loaded from each. selected: positions recomputed to the last layer.
    began: `time.perf_counter` at the beginning, which times count from; scores, chosen, looks: as
    in `Blended`.
    """

    logits: torch.Tensor
    found: tuple[Source, ...]
    used: tuple[Source, ...]
    cached_tokens: int
    selected: tuple[int, ...]
    per_layer: tuple[int, ...]
    skipped: str | None
    bytes_loaded: int
    tiers: Mapping[str, int]
    ttft_s: float
    watch: Stopwatch
    notes: tuple[str, ...]
    began: float
    scores: tuple[tuple[int, torch.Tensor, torch.Tensor], ...] = ()
    chosen: tuple[int, ...] = ()
    looks: Looks | None = None

    def used_stored_kv(self, options: BlendOptions) -> bool:
        """Whether it is an approximation, and not a full prefill or an exact leading part."""
        approximate = options.mode in ("blend", "reuse") and not options.computes_all
        return approximate and not self.skipped and self.cached_tokens > 0


@dataclass(frozen=True, kw_only=True)
class Prefilled(PrefillRun):
    """With the KV cache, which the answer goes on in."""

    cache: KVCache
    tables: Tables


class Prefiller:
    """Prefills prompts on one model from one store (or none)."""

    def __init__(self, model: Decoder, store: KVStore | None, spec: KVSpec) -> None:
        self.model, self.store, self.spec = model, store, spec
        self._rate: float | None = None  # tokens a second that this model computes here
        self._codec = Codec.of(spec, model.dtype)

    def __call__(
        self,
        prompt: Prompt,
        options: BlendOptions,
        room: int = 0,
        observer: Observer | None = None,
        cache: KVCache | None = None,
    ) -> Prefilled:
        """Brings a prompt to its first output token; `room`: tokens the answer may take.

        cache: to go on in, for a prompt that begins with tokens kept there, in the same length
        regime; with room for prompt and answer. Its rows past those are overwritten.
        An entry found damaged while it is read is dropped from the store and the prompt begun
        again without it, so that no doubtful byte reaches an answer.
        """
        options.check_model(self.model.config.layers)
        length, context = len(prompt.token_ids), self.model.config.context
        require_room(length, context)
        began = time.perf_counter()
        notes: list[str] = []
        if self.store is not None and options.mode != "full":
            self._look_ahead(self.store, prompt)
        known = len(self.store.damaged) if self.store is not None else 0
        while True:
            watch = Stopwatch()
            if observer is not None:
                observer.prefill(prompt, watch, began)
            try:
                run = self._prefill_once(
                    prompt, options, cache or min(length + room, context), watch
                )
                synchronize(self.model.device)
                ttft = time.perf_counter() - began
                if observer is not None:
                    observer.prefilled(ttft)
                if self.store is not None:
                    passed = dict.fromkeys(self.store.damaged[known:])
                    notes += [f"{line}: left out and computed instead" for line in passed]
                    notes += self.store.take_notes()
                self._note_rate(run, length)
                return replace(run, ttft_s=ttft, notes=tuple(notes), began=began)
            except DamagedSource as error:
                key, message, lost = error.key, error.message, error.lost
            # Only here is what the error held of the entry gone: one in use is not discarded.
            if lost:  # the store has a note on it
                continue
            if self.store is not None:
                self.store.discard(key)
            notes.append(f"{message}: left out and computed instead")

    def _look_ahead(self, store: KVStore, prompt: Prompt) -> None:
        """Tells the store what will be looked for, and how long computing it would take, which is
        as long as a remote may be waited for."""
        new = (s for s in prompt.segments if s.end > prompt.kept)
        chunks = [s.token_ids for s in new if s.kind in ("prefix", "chunk")]
        seconds = sum(map(len, chunks)) / self._rate if self._rate else None
        store.look_ahead(self.spec, chunks, seconds)

    def _note_rate(self, run: Prefilled, length: int) -> None:
        """What computing took; few tokens take longer each than many, so the best time counts."""
        layers = self.model.config.layers
        chosen = sum(run.per_layer) / layers
        known = (s.segment for s in run.used if s.match or s.status == "kept")
        always = length - sum(segment.end - segment.start for segment in known)
        seconds = run.watch.recompute.seconds
        if seconds > 0 and always + chosen > 0:
            self._rate = max(self._rate or 0.0, (always + chosen) / seconds)

    def _prefill_once(
        self, prompt: Prompt, options: BlendOptions, space: KVCache | int, watch: Stopwatch
    ) -> Prefilled:
        """space: the KV cache to fill, or the capacity of a new one."""
        model, ids = self.model, prompt.token_ids
        regime = model.rope.regime(len(ids))
        with watch.load, watch.stall:
            found = find_sources(
                prompt, self.store, self.spec, regime, options.mode, options.strict_context
            )
        cached = [p for s in found if s.cached for p in range(s.segment.start, s.segment.end)]
        skipped = too_few(options, len(cached), prompt.kept)
        cache = model.new_cache(space) if isinstance(space, int) else space
        cache.length = prompt.kept
        tables = model.rope.tables(len(ids), cache.capacity)
        used, bytes_loaded = found, 0
        tiers: Mapping[str, int] = {}
        result: Blended | None = None
        if skipped or options.mode == "full" or options.computes_all:
            with watch.recompute:
                logits = forward(model, cache, ids[prompt.kept :], tables, watch=watch)
            selected = tuple(cached) if not skipped and options.computes_all else ()
            per_layer = (len(selected),) * model.config.layers
            if not selected:
                used = tuple(source.computed() for source in found)
        else:
            with (
                self._pinned(found),
                make_loader(options.loader, model, self.store, found, watch, self._codec) as loader,
            ):
                result = blend(model, ids, found, loader, options, cache, tables, watch)
                bytes_loaded, tiers = loader.bytes_loaded, loader.tiers
            logits, selected, per_layer = result.logits, result.selected, result.per_layer
        return Prefilled(
            logits=logits,
            cache=cache,
            tables=tables,
            found=found,
            used=used,
            cached_tokens=len(cached),
            selected=selected,
            per_layer=per_layer,
            skipped=skipped,
            bytes_loaded=bytes_loaded,
            tiers=tiers,
            ttft_s=0.0,
            watch=watch,
            notes=(),
            began=watch.began,
            scores=result.scores if result is not None else (),
            chosen=result.chosen if result is not None else (),
            looks=result.looks if result is not None else None,
        )

    def _pinned(self, sources: Sequence[Source]) -> AbstractContextManager[object]:
        """What is being read is not evicted meanwhile."""
        if self.store is None:
            return nullcontext()
        return self.store.pinned([s.match.key for s in sources if s.match is not None])


def require_room(length: int, context: int) -> None:
    """Raises UsageError for a prompt of so many tokens that no answer fits behind."""
    if length >= context:
        raise UsageError(
            f"a prompt of {length} tokens leaves no room in the model's context of {context}",
            "use fewer or smaller chunks (--top-k, --chunk), or a shorter question",
        )


def too_few(options: BlendOptions, cached: int, kept: int = 0) -> str | None:
    """Why a blend is not worth it, or None. kept: tokens in front that nothing is done for."""
    if options.mode != "blend" or cached >= options.min_tokens or (kept and not cached):
        return None
    all_of_it = "all that is new in it was computed" if kept else "the whole prompt was prefilled"
    return f"{cached} cached tokens; blending begins at {options.min_tokens}, so {all_of_it}"
