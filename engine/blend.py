"""CacheBlend: reuse stored chunk KV, recompute the selected tokens layer by layer.

The algorithm of CacheBlend (arXiv 2405.16444, section 4): layers up to the first check layer are
computed for every cached token, the deviation of fresh from cached K and V there names the tokens
worth recomputing, and from then on only these go through the layers, their fresh K and V taking
the place of the cached ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache_store.errors import UsageError
from engine.attention import AttentionPlan
from engine.kv_cache import KVCache
from engine.loaders import LayerLoader, LoadedSegment
from engine.model import Decoder
from engine.options import BlendOptions
from engine.policies import Candidates, LayerKV, budget, make_policy, select
from engine.rope import Tables
from engine.sources import Source
from engine.timing import Stopwatch


@dataclass(frozen=True)
class Blended:
    """What a blend computed. The KV cache it filled holds the rest.

    logits: float32 [1, vocab] after the prompt's last token. per_layer: how many cached tokens got
    fresh K and V at each layer. selected: positions recomputed to the last layer. scores: one
    entry a selection made: (layer, positions scored, scores), as CPU tensors.
    """

    logits: torch.Tensor
    per_layer: tuple[int, ...]
    selected: tuple[int, ...]
    scores: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]


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
) -> Blended:
    """Fills `cache` for the whole prompt and returns the first output token's logits.

    Always computed: the suffix, separators, missed chunks and a prefix that is not stored. Never
    computed: exact segments. Hit chunks' tokens are computed where the policy selects them.
    Raises UsageError for explicit positions outside the cached tokens, DamagedSource.
    """
    run = _Blend(model, sources, loader, options, cache, tables, watch)
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
    ) -> None:
        self.model, self.loader, self.cache = model, loader, cache
        self.tables, self.watch = tables, watch
        self.policy = make_policy(options.policy, seed=options.seed, indices=options.indices)
        always = [s for s in sources if s.status in ("computed", "miss")]
        hits = [s for s in sources if s.status == "hit"]
        exact_chunks = [s for s in sources if s.status == "exact" and s.segment.kind == "chunk"]
        self.always, self.hits = _positions(always), _positions(hits)
        self.cached = len(self.hits) + len(_positions(exact_chunks))
        if options.indices is not None:
            _check_indices(options.indices, self.hits + _positions(exact_chunks))
        self.stages = self._stages(options)
        self.scores: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def _stages(self, options: BlendOptions) -> dict[int, int]:
        """Check layer -> how many tokens stay selected from there on."""
        layers = list(options.check_layers)
        if not self.policy.needs_deviation:
            layers[0] = 0
        sizes = [budget(ratio, len(self.hits), self.cached) for ratio in options.ratios]
        if options.mode != "blend" or (sizes[0] == 0 and options.indices is None):
            return {}  # reuse: nothing to select, so no full layer either
        return dict(zip(layers, sizes, strict=True))

    def __call__(self, token_ids: Sequence[int]) -> Blended:
        model = self.model
        first = next(iter(self.stages), None)
        full_until = first if first is not None and self.policy.needs_deviation else -1
        self.loader.start(exact_before=full_until)
        chosen = self.hits if full_until >= 0 else []
        if first == 0:
            chosen = self._choose_by_position(self.hits, 0)
        self._set_current(chosen)
        x = model.embed(torch.tensor(token_ids, device=model.device)[self.positions])
        per_layer = []
        last_layer = model.config.layers - 1
        for layer in range(model.config.layers):
            per_layer.append(len(self.chosen))
            loaded = self.loader.layer(layer)
            self._place(layer, loaded, exact_only=layer <= full_until)
            with self.watch.recompute:
                normed = model.norm_in(layer, x)
                k, v = model.keys_values(layer, normed)
                model.store(layer, self.cache, self.positions, k, v, self.rows)
            if layer in self.stages and layer > 0:
                with self.watch.score:
                    keep = self._narrow(layer, LayerKV(k, v), loaded)
                    x, normed = x[keep], normed[keep]
            self.loader.release()
            with self.watch.recompute:
                if layer == last_layer:  # only the first output token is left to know
                    x, normed = x[-1:], normed[-1:]
                    self._set_plan(self.plan.last(1))  # the suffix's end, always computed
                q = model.rotated(layer, model.queries(layer, normed), self.rows)
                attention = model.attend(layer, q, self.cache, self.plan)
                x = model.finish(layer, x, attention)
        with self.watch.recompute:
            self.cache.length = len(token_ids)
            logits = model.logits(x)
        return Blended(logits, tuple(per_layer), tuple(self.chosen), tuple(self.scores))

    def _set_current(self, chosen: list[int]) -> None:
        """Sets the tokens computed from here on: the always computed ones and `chosen`."""
        self.chosen = chosen
        self._set_plan(self.model.plan(sorted(self.always + chosen)))

    def _set_plan(self, plan: AttentionPlan) -> None:
        self.plan, self.positions = plan, plan.positions
        self.rows = self.tables[plan.positions]

    def _place(self, layer: int, loaded: list[LoadedSegment], *, exact_only: bool) -> None:
        """Puts stored K, rotated to where it now stands, and V into the KV cache."""
        with self.watch.rotate:
            # Where not only exact ones count, every other token is computed at this layer.
            parts = [part for part in loaded if part.exact or not exact_only]
            runs = [(part.start, part.kv.k, part.kv.v) for part in parts]
            self.model.store_runs(layer, self.cache, runs, self.tables)

    def _choose_by_position(self, positions: list[int], layer: int) -> list[int]:
        """Selection before anything is computed, by a policy that needs no deviation."""
        with self.watch.score:
            candidates = Candidates(torch.tensor(positions, dtype=torch.int64))
            return [positions[i] for i in self._select(layer, candidates)]

    def _narrow(self, layer: int, fresh: LayerKV, loaded: list[LoadedSegment]) -> torch.Tensor:
        """Selects among the cached tokens still computed.

        fresh: K and V of the current tokens. Returns which rows of them stay, int64.
        """
        in_chosen = torch.isin(
            self.positions, torch.tensor(self.chosen, dtype=torch.int64, device=self.model.device)
        )
        candidates = Candidates(self.positions[in_chosen])
        if self.policy.needs_deviation:
            cached = _gather(loaded, self.hits, candidates.positions)
            fresh = LayerKV(fresh.k[in_chosen], fresh.v[in_chosen])
            candidates = Candidates(candidates.positions, fresh, cached)
        before = self.positions
        self._set_current([self.chosen[i] for i in self._select(layer, candidates)])
        return torch.isin(before, self.positions).nonzero().flatten()

    def _select(self, layer: int, candidates: Candidates) -> list[int]:
        scores = self.policy.score(candidates)
        count = self.policy.count(candidates, self.stages[layer])
        self.scores.append((layer, candidates.positions.cpu(), scores.float().cpu()))
        return select(scores, count).tolist()


def _positions(sources: Sequence[Source]) -> list[int]:
    return [p for s in sources for p in range(s.segment.start, s.segment.end)]


def _gather(loaded: list[LoadedSegment], hits: list[int], wanted: torch.Tensor) -> LayerKV:
    """Cached K (before RoPE) and V of the hit tokens at `wanted` positions, in that order."""
    parts = [part.kv for part in loaded if not part.exact]
    rows = torch.searchsorted(torch.tensor(hits, device=wanted.device), wanted)
    return LayerKV(
        torch.cat([part.k for part in parts])[rows], torch.cat([part.v for part in parts])[rows]
    )


def _check_indices(indices: Sequence[int], cached: Sequence[int]) -> None:
    outside = sorted(set(indices) - set(cached))
    if outside:
        raise UsageError(
            f"position {outside[0]} is not a cached token of this prompt",
            "positions of prefix, separators, suffix and missed chunks are always computed",
        )
