"""Whether blending computes what it should on a model's real weights (DESIGN's identities)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.calibration.ground import Ground
from engine.calibration.outcome import GateCheck
from engine.calibration.straight import LayersKV, Straight, StraightRun
from engine.compare import divergence
from engine.forward import forward
from engine.options import BlendOptions
from engine.prefill import Prefilled, Prefiller
from engine.prompt import Prompt

NUMBERS = (7, 0, 12, 9)  # the passages of the prompt, in an order they weren't computed in
QUESTION = "Who is the director of the museum of Lindau?"
FORCED = 8  # tokens fed after the prompt, so that more than one row of logits is compared
EVERY = 7  # of the tokens that are scattered over the chunks

# What float32 and the types that round more may differ by from the plain way. KL in nats, KV as
# a share of its size. The default model: KL at most 0.0013 in bf16 and 1e-11 in float32, KV 0.019
# and 2e-6.
KL_LIMIT = {"fp32": 1e-5, "fp16": 0.005, "bf16": 0.005}
KV_LIMIT = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.08}


@dataclass(frozen=True)
class Identities:
    """The checks, over one prompt of a few chunks."""

    ground: Ground

    def __call__(self) -> Iterator[GateCheck]:
        yield self.full()
        yield self.placed()
        yield self.counted()
        yield self.everything()
        yield self.exact()
        yield self.missing()
        yield self.scattered()
        yield self.blended()
        yield self.repeated()

    # The checks.

    def full(self) -> GateCheck:
        run = self.run(self.prompt, mode="full")
        return self._kl("full prefill", run, self.reference, "plain causal attention, float32")

    def placed(self) -> GateCheck:
        """Stored keys and values of chunks in another order, at every layer of the KV cache."""
        error = self._kv_error(self.run(self.prompt, ratio=0), self.stored, self.hits)
        return GateCheck(
            "stored KV in place",
            error,
            self._kv_limit,
            "keys turned to where they stand and values, all layers, against each chunk alone "
            "behind the prefix",
        )

    def counted(self) -> GateCheck:
        run = self.run(self.prompt, ratio=0)
        computed = {s.segment.kind for s in run.used if s.status == "computed"}
        wrong = sum(run.per_layer) + len(run.selected) + len(computed - {"suffix", "separator"})
        return GateCheck(
            "reuse computes nothing else", wrong, 0, "cached tokens computed at ratio 0"
        )

    def everything(self) -> GateCheck:
        """All cached tokens, layer by layer, and once more by the short cut of ratio 1."""
        slow = self.run(self.prompt, policy="explicit", indices=self.cached)
        values = [self._divergence(run, self.reference) for run in (slow, self.run(ratio=1))]
        return GateCheck(
            "ratio 1 is full prefill",
            max(values),
            self._kl_limit,
            "everything recomputed, chunks in another order",
        )

    def exact(self) -> GateCheck:
        prompt = self.ground.prompt(QUESTION, NUMBERS[1:2])
        run = self.run(prompt, ratio=0)
        expected = self.straight(self._forced(prompt), rows=FORCED + 1)
        return self._kl("first chunk as stored", run, expected, "a chunk behind its own prefix")

    def missing(self) -> GateCheck:
        engine = self.ground.engine
        nothing = Prefiller(engine.model, None, engine.spec)
        run = nothing(self.prompt, BlendOptions.of(min_tokens=0), room=FORCED)
        return self._kl("all chunks missing", run, self.reference, "a blend without stored KV")

    def scattered(self) -> GateCheck:
        """Every so many tokens recomputed: fresh K and V against those of the plain way."""
        chosen = self.hits[::EVERY]
        run = self.run(self.prompt, policy="explicit", indices=chosen)
        at = sorted([*self.always, *chosen])
        expected = self._blend(self.prompt, [at] * self.layers)
        return GateCheck(
            "scattered tokens",
            self._kv_error(run, expected.kv, at),
            self._kv_limit,
            "keys and values recomputed of single tokens, which see all earlier tokens and no "
            "later one",
        )

    def blended(self) -> GateCheck:
        """What a blend does by default, its own selection taken as it is. Transfer is left out: it
        is no identity, but moves stored KV by an estimate."""
        run = self.run(self.prompt, transfer=False)
        by_count = {len(self.hits): self.hits, len(run.selected): list(run.selected)}
        known = all(count in by_count for count in run.per_layer)
        if not known:  # a selection that narrows step by step: its last step stands for all
            run = self.run(self.prompt, policy="explicit", indices=run.selected, transfer=False)
        layers = [sorted([*self.always, *by_count.get(n, [])]) for n in run.per_layer]
        return self._kl("blend", run, self._blend(self.prompt, layers), "selection by default")

    def repeated(self) -> GateCheck:
        one, other = (self.run(self.prompt).logits for _ in range(2))
        changed = int((one != other).sum())
        return GateCheck("same twice", changed, 0, "logits that differ when a blend is repeated")

    # What they are made of.

    def run(self, prompt: Prompt | None = None, **options: object) -> Prefilled:
        chosen = BlendOptions.of(**{"min_tokens": 0, **options})  # type: ignore[arg-type]
        return self.ground.prefill(prompt or self.prompt, chosen, room=FORCED)

    @cached_property
    def prompt(self) -> Prompt:
        return self.ground.prompt(QUESTION, NUMBERS)

    @cached_property
    def straight(self) -> Straight:
        return Straight(self.ground.engine.model)

    @cached_property
    def reference(self) -> StraightRun:
        """The whole prompt, the plain way."""
        return self.straight(self._forced(self.prompt), rows=FORCED + 1)

    @cached_property
    def stored(self) -> LayersKV:
        """K and V of all positions as the store should have them, each chunk alone behind the
        prefix; of separators and suffix whatever a full prefill gives."""
        prefix, parts = self.prompt.prefix_ids, []
        for segment in self.prompt.segments:
            if segment.kind == "chunk":
                alone = self.straight((*prefix, *segment.token_ids)).kv
                parts.append(alone.rows(len(prefix)))
            else:
                parts.append(self.reference.kv.rows(segment.start, segment.end))
        return LayersKV.join(parts)

    @property
    def layers(self) -> int:
        return self.ground.engine.model.config.layers

    @cached_property
    def cached(self) -> list[int]:
        return self._positions("chunk")

    @cached_property
    def hits(self) -> list[int]:
        """Cached tokens that aren't exact: those of all chunks but the first."""
        first = next(s for s in self.prompt.segments if s.kind == "chunk")
        return [p for p in self.cached if p >= first.end]

    @cached_property
    def always(self) -> list[int]:
        return self._positions("separator", "suffix")

    def _positions(self, *kinds: str) -> list[int]:
        segments = [s for s in self.prompt.segments if s.kind in kinds]
        return [p for s in segments for p in range(s.start, s.end)]

    def _blend(self, prompt: Prompt, computed: Sequence[Sequence[int]]) -> StraightRun:
        """A blend the plain way: `computed` of each layer, and the tokens fed after it."""
        ids = self._forced(prompt)
        tail = list(range(len(prompt.token_ids), len(ids)))
        filler = self.reference.kv.rows(len(prompt.token_ids), len(ids))
        stored = LayersKV.join([self.stored, filler])
        layers = [[*at, *tail] for at in computed]
        return self.straight(ids, computed=layers, stored=stored, rows=FORCED + 1)

    @cached_property
    def _tail(self) -> tuple[int, ...]:
        """What is fed after a prompt: some of another passage, the same for every prompt."""
        return self.ground.chunks[-1].token_ids[:FORCED]

    def _forced(self, prompt: Prompt) -> tuple[int, ...]:
        return (*prompt.token_ids, *self._tail)

    @torch.inference_mode()
    def _divergence(self, run: Prefilled, expected: StraightRun) -> float:
        """Mean KL(plain way || run) at the prompt's end and along the tokens fed after it."""
        model, length = self.ground.engine.model, run.cache.length
        fed = forward(model, run.cache, self._tail, run.tables, last=None)
        run.cache.length = length
        return float(divergence(expected.logits, torch.cat([run.logits, fed])).mean())

    def _kl(self, name: str, run: Prefilled, expected: StraightRun, said: str) -> GateCheck:
        value = self._divergence(run, expected)
        return GateCheck(name, value, self._kl_limit, f"mean KL, nats: {said}")

    def _kv_error(self, run: Prefilled, expected: LayersKV, at: Sequence[int]) -> float:
        """The largest over layers, K and V, of the difference's size over what it should be."""
        worst, total = 0.0, len(self.prompt.token_ids)
        for layer in range(self.layers):
            k, v = (x[list(at)] for x in run.cache.rows(layer, 0, total))
            turned = self.straight.turn(layer, expected.k[layer][list(at)], at, total)
            for found, wanted in ((k, turned), (v, expected.v[layer][list(at)])):
                difference = (found.float() - wanted).norm() / wanted.norm()
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
        return worst

    @property
    def _kl_limit(self) -> float:
        return KL_LIMIT[self.ground.engine.info.dtype]

    @property
    def _kv_limit(self) -> float:
        return KV_LIMIT[self.ground.engine.info.dtype]
