"""CacheBlend: reuse stored chunk KV, recompute the selected tokens layer by layer.

The algorithm of CacheBlend (arXiv 2405.16444, section 4): layers up to the first check layer are
computed for every cached token, the deviation of fresh from cached K and V there names the tokens
worth recomputing, and from then on only these go through the layers, their fresh K and V taking
the place of the cached ones. A policy that asks the question instead needs no such layers: the
question runs over the reused KV (`engine.scoring`), and what it looks at is recomputed from layer 0
on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from cache_store.errors import UsageError
from engine.attention import AttentionPlan
from engine.kv_cache import KVCache
from engine.loaders import LayerLoader, LoadedSegment
from engine.model import Decoder
from engine.options import BlendOptions
from engine.policies import (
    Candidates,
    LayerKV,
    Outputs,
    covering,
    make_policy,
    select,
)
from engine.rope import Tables
from engine.scoring import QuestionReader, Reading
from engine.sources import Source
from engine.stages import cached_tokens, question_layers, stages
from engine.timing import Stopwatch
from engine.transfer import Transfer


@dataclass(frozen=True)
class Looks:
    """How much the question looked at each hit: float32 [layers, n], at positions [n]."""

    layers: range
    positions: tuple[int, ...]
    amounts: torch.Tensor


@dataclass(frozen=True)
class Blended:
    """What a blend computed. The KV cache it filled holds the rest.

    logits: float32 [1, vocab] after the prompt's last token. per_layer: how many cached tokens got
    fresh K and V at each layer. selected: positions recomputed to the last layer. scores: one
    entry a selection made: (layer, positions scored, scores), as CPU tensors; chosen: how many
    stayed, for each. looks: what the question looked at, where it was asked.
    """

    logits: torch.Tensor
    per_layer: tuple[int, ...]
    selected: tuple[int, ...]
    scores: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]
    chosen: tuple[int, ...] = ()
    looks: Looks | None = None


@dataclass(frozen=True)
class Ending:
    """A suffix that somebody else computes, over the KV that was blended.

    question: so many of its tokens, from its first one on, are read where a policy asks the
    question. on_layer(layer): a layer's KV is in the cache, up to where the suffix begins.
    """

    question: int
    on_layer: Callable[[int], None]


@torch.inference_mode()
def blend(
    model: Decoder,
    token_ids: Sequence[int],
    sources: Sequence[Source],
    loader: LayerLoader,
    options: BlendOptions,
    cache: KVCache,
    tables: Tables,
    watch: Stopwatch,
    ending: Ending | None = None,
) -> Blended:
    """Fills `cache` for the whole prompt and returns the first output token's logits.

    Always computed: the suffix, separators, missed chunks and a prefix that is not stored. Never
    computed: exact segments. Hit chunks' tokens are computed where the policy selects them.
    ending: where somebody else computes the suffix; there are no logits then, [0, 0]. Raises
    UsageError for explicit positions outside the cached tokens, DamagedSource.
    """
    run = _Blend(model, sources, loader, options, cache, tables, watch, ending)
    return run(token_ids)


class _Blend:
    """The state of one blend: which tokens are still being computed, and their hidden states."""

    def __init__(
        self,
        model: Decoder,
        sources: Sequence[Source],
        loader: LayerLoader,
        options: BlendOptions,
        cache: KVCache,
        tables: Tables,
        watch: Stopwatch,
        ending: Ending | None,
    ) -> None:
        self.model, self.loader, self.cache, self.ending = model, loader, cache, ending
        self.tables, self.watch = tables, watch
        self.policy = make_policy(options.policy, seed=options.seed, indices=options.indices)
        self.threshold = options.threshold
        always = [s for s in sources if s.status in ("computed", "miss")]
        hits = [s for s in sources if s.status == "hit"]
        exact_chunks = [s for s in sources if s.status == "exact" and s.segment.kind == "chunk"]
        self.always, self.hits = _positions(always), _positions(hits)
        self.offsets = [p - s.segment.start for s in hits for p in _positions([s])]
        self.hit_sources = hits
        self.transfers = options.transfers
        self.transfer: Transfer | None = None
        self.suffix = len(sources[-1].segment.token_ids)
        self.asking = self.always  # what runs over the reused KV where the question is asked
        if ending is not None:
            begins = len(self.always) - self.suffix
            self.asking = self.always[: begins + ending.question]
            self.always, self.suffix = self.always[:begins], ending.question
        self.cached = cached_tokens(sources)
        if options.indices is not None:
            check_indices(options.indices, self.hits + _positions(exact_chunks))
        self.stages = stages(options, self.policy, len(self.hits), self.cached)
        self.question = question_layers(options, sources, model.config.layers)
        if self.question and cache.passing:
            raise ValueError("the question reads all layers first, and this cache holds one")
        self.reading: Reading | None = None
        self.scores: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.counts: list[int] = []

    def __call__(self, token_ids: Sequence[int]) -> Blended:
        model = self.model
        first = next(iter(self.stages), None)
        full_until = first if first is not None and self.policy.full_layers else -1
        # Where the question reads the reused KV, it reads all of it.
        self.loader.start(exact_before=0 if self.question else full_until)
        if self.question:
            self.reading = self._read(token_ids)
        read = self.question.stop  # layers whose stored KV is in the cache already
        chosen = self.hits if full_until >= 0 else []
        if first == 0:
            chosen = self._choose(self.hits, 0)
        self._set_current(chosen)
        x = model.embed(torch.tensor(token_ids, device=model.device)[self.positions])
        per_layer = []
        last_layer = model.config.layers - 1
        for layer in range(model.config.layers):
            self.watch.computing(layer)
            per_layer.append(len(self.chosen))
            checks = layer in self.stages and layer > 0
            loaded = self.loader.layer(layer) if layer >= read else []
            # Where not only exact ones count, every other token is computed at this layer.
            needed = layer > full_until or (checks and "output" in self.policy.needs)
            if layer >= read:
                self._place(layer, loaded, exact_only=not needed)
            if len(x):
                moves = layer > max(full_until, 0)  # layer 0 is exact
                x, normed = self._keys_values(layer, x, loaded, checks=checks, moves=moves)
            self.loader.release()
            if self.ending is not None:
                self.ending.on_layer(layer)
            if not len(x) or (self.ending is not None and layer == last_layer):
                continue
            with self.watch.recompute:
                if layer == last_layer:  # only the first output token is left to know
                    x, normed = x[-1:], normed[-1:]
                    self._set_plan(self.plan.last(1))  # the suffix's end, always computed
                q = model.rotated(layer, model.queries(layer, normed), self.rows)
                attention = model.attend(layer, q, self.cache, self.plan)
                x = model.finish(layer, x, attention)
        self.watch.through()
        with self.watch.recompute:
            self.cache.length = len(token_ids)
            ended = self.ending is not None
            logits = x.new_empty((0, 0), dtype=torch.float32) if ended else model.logits(x)
        looks = None
        if self.reading is not None:
            looks = Looks(self.question, tuple(self.hits), self.reading.question)
        return Blended(
            logits,
            tuple(per_layer),
            tuple(self.chosen),
            tuple(self.scores),
            tuple(self.counts),
            looks,
        )

    def _keys_values(
        self,
        layer: int,
        x: torch.Tensor,
        loaded: list[LoadedSegment],
        *,
        checks: bool,
        moves: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the current tokens' K and V into the cache, and selects among them at a check layer.

        moves: whether stored KV is moved like what is recomputed. Returns the hidden states of the
        tokens that stay, and these normed."""
        model = self.model
        with self.watch.recompute:
            normed = model.norm_in(layer, x)
            k, v = model.keys_values(layer, normed)
        cached = None
        if checks and "output" in self.policy.needs:
            with self.watch.score:
                cached = self._outputs_of_cached(layer, normed, LayerKV(k, v))
        with self.watch.recompute:
            if self.transfer is not None and moves:
                self.transfer(layer, self.cache, LayerKV(k[self.mine], v[self.mine]))
            model.store(layer, self.cache, self.positions, k, v, self.rows)
        if not checks:
            return x, normed
        with self.watch.score:
            outputs = None
            if cached is not None:
                outputs = Outputs(self._outputs(layer, normed), cached)
            keep = self._narrow(layer, LayerKV(k, v), loaded, outputs)
            return x[keep], normed[keep]

    def _set_current(self, chosen: list[int]) -> None:
        """Sets the tokens computed from here on: the always computed ones and `chosen`."""
        self.chosen = chosen
        self._set_plan(self.model.plan(sorted(self.always + chosen)))
        self.mine = self._rows_of(chosen)
        self.transfer = None
        if self.transfers and chosen:
            self.transfer = Transfer(self.model, self.tables, self.hit_sources, chosen)

    def _set_plan(self, plan: AttentionPlan) -> None:
        self.plan, self.positions = plan, plan.positions
        self.rows = self.tables[plan.positions]

    def _place(self, layer: int, loaded: list[LoadedSegment], *, exact_only: bool) -> None:
        """Puts stored K, rotated to where it now stands, and V into the KV cache."""
        with self.watch.rotate:
            parts = [part for part in loaded if part.exact or not exact_only]
            runs = [(part.start, part.kv.k, part.kv.v) for part in parts]
            self.model.store_runs(layer, self.cache, runs, self.tables)

    def _read(self, token_ids: Sequence[int]) -> Reading:
        """Brings stored KV into the cache and lets the question read it."""
        reader = QuestionReader(
            *(self.model, self.cache, self.tables, self.asking, self.suffix, self.policy.looks)
        )
        keeps = [layer for layer in self.stages if layer > 0] if self.policy.full_layers else []
        kept: dict[int, LayerKV] = {}
        with self.watch.score:
            reader.begin(token_ids)
        for layer in range(self.question.stop):
            self.watch.reading(layer)
            loaded = self.loader.layer(layer)
            self._place(layer, loaded, exact_only=False)
            if layer in keeps:  # what it holds is needed again, and the loader gives it once
                kept[layer] = _joined(loaded)
            self.loader.release()
            with self.watch.score:
                reader.layer(layer, self.question)
        self.watch.between()
        with self.watch.score:
            hits = torch.tensor(self.hits, device=self.model.device)
            looks = self.policy.joined(reader.looked(hits), self.model.ranks)
            return Reading(looks, kept)

    def _outputs_of_cached(self, layer: int, normed: torch.Tensor, fresh: LayerKV) -> torch.Tensor:
        """Attention's output of the tokens still chosen over stored KV, which the KV cache holds;
        what is always computed is never stored, and goes there fresh."""
        others = self._rows_of(self.always)
        self.model.store(
            *(layer, self.cache, self.positions[others], fresh.k[others], fresh.v[others]),
            self.rows[others],
        )
        return self._outputs(layer, normed)

    def _outputs(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Attention's output of the tokens still chosen, over what the KV cache holds."""
        q = self.model.rotated(layer, self.model.queries(layer, normed), self.rows)
        return self.model.attend(layer, q, self.cache, self.plan)[self.mine]

    def _rows_of(self, positions: list[int]) -> torch.Tensor:
        """Which rows of the current tokens are those at these positions, int64 [n]."""
        wanted = torch.tensor(positions, dtype=torch.int64, device=self.model.device)
        return torch.searchsorted(self.positions, wanted)

    def _choose(self, positions: list[int], layer: int) -> list[int]:
        """Selection among cached tokens before any of them is computed."""
        with self.watch.score:
            candidates = self._candidates(torch.tensor(positions, dtype=torch.int64))
            return [positions[i] for i in self._select(layer, candidates)]

    def _candidates(self, positions: torch.Tensor) -> Candidates:
        """The cached tokens at `positions`, with what is known of them from the start."""
        positions = positions.to(self.model.device)
        hits = torch.tensor(self.hits, dtype=torch.int64, device=positions.device)
        offsets = torch.tensor(self.offsets, dtype=torch.int64, device=positions.device)
        rows = torch.searchsorted(hits, positions)
        question = None
        if self.reading is not None:
            asked = self.reading.question  # [layers, hits]
            question = asked if len(rows) == asked.shape[1] else asked[:, rows]
        return Candidates(positions, offsets[rows], question=question, ranks=self.model.ranks)

    def _narrow(
        self,
        layer: int,
        fresh: LayerKV,
        loaded: list[LoadedSegment],
        outputs: Outputs | None,
    ) -> torch.Tensor:
        """Selects among the cached tokens still computed.

        fresh: K and V of the current tokens; outputs: of those that are cached ones. Returns which
        rows of the current tokens stay, int64.
        """
        mine = self.mine
        candidates = replace(self._candidates(self.positions[mine]), outputs=outputs)
        if "deviation" in self.policy.needs:
            read = self.reading.kept.get(layer) if self.reading else None
            stored = read or _joined(loaded)
            hits = torch.tensor(self.hits, device=self.model.device)
            rows = torch.searchsorted(hits, candidates.positions)
            cached = LayerKV(stored.k[rows], stored.v[rows])
            fresh = LayerKV(fresh.k[mine], fresh.v[mine])
            candidates = replace(candidates, fresh=fresh, cached=cached)
        kept = [self.chosen[i] for i in self._select(layer, candidates)]
        keep = self._rows_of(sorted(self.always + kept))
        self._set_current(kept)
        return keep

    def _select(self, layer: int, candidates: Candidates) -> list[int]:
        if "question" in self.policy.needs and self.reading is None:
            # It wasn't asked, for all of them stay, or none does.
            return list(range(len(candidates.positions) if self.stages[layer] else 0))
        scores = self.policy.score(candidates)
        count = self.policy.count(candidates, self.stages[layer])
        if self.threshold is not None:
            count = covering(scores, self.threshold)
        self.scores.append((layer, candidates.positions.cpu(), scores.float().cpu()))
        chosen = self.model.ranks.chosen(select(scores, count), len(scores))
        kept: list[int] = chosen.tolist()
        self.counts.append(len(kept))
        return kept


def _positions(sources: Sequence[Source]) -> list[int]:
    return [p for s in sources for p in range(s.segment.start, s.segment.end)]


def _joined(loaded: list[LoadedSegment]) -> LayerKV:
    """Stored K (before RoPE) and V of all hits, in order; copies, which outlive the loader's."""
    parts = [part.kv for part in loaded if not part.exact]
    return LayerKV(torch.cat([part.k for part in parts]), torch.cat([part.v for part in parts]))


def check_indices(indices: Sequence[int], cached: Sequence[int]) -> None:
    """Raises UsageError for explicit positions outside the cached tokens'."""
    outside = sorted(set(indices) - set(cached))
    if outside:
        raise UsageError(
            f"position {outside[0]} is not a cached token of this prompt",
            "positions of prefix, separators, suffix and missed chunks are always computed",
        )
