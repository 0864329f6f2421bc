"""Whether blending computes what vLLM itself does: tried when vLLM starts, on made-up prompts.

Two prompts go through vLLM's own prefill, and through blending: one whose chunk stands where it was
computed, reused as it is, and one whose chunks are joined in another order, everything computed
anew. Either way vLLM computes the suffix over the KV in its blocks. What it says then must be the
same, and so must be the keys and values that were written.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, TypeVar, cast

import torch

from engine.compare import divergence
from engine.model import DTYPES
from engine.options import BlendOptions
from engine.prompt import Prompt, PromptChunk, lay_out
from engine.sources import KVStore, find_sources
from engine.vllm.fp8 import fp8_kind, rounded
from engine.vllm.memory_store import MemoryStore
from engine.vllm.plan import BlendPlan, RequestPlan, SavePlan
from engine.vllm.text import one_line
from engine.vllm.worker import BlendWorker

TOKENS = 320  # of a prompt: enough for blocks of 128 to be crossed
LEAST = 48
POSITIONS = 8  # whose next tokens are compared
FIRST_BLOCK = 1  # block 0 is vLLM's own

NOISE = 2  # or so many times what vLLM's own prefill differs by when it is done in two steps


@dataclass(frozen=True)
class Limits:
    """kl: in nats, on average. apart: of a layer's keys or values, the length of the difference
    over theirs."""

    kl: float
    apart: float


# What is wrong in kind, as RoPE or a mask, is more than 1 apart and at a KL over 1.
USUAL = Limits(kl=0.01, apart=0.25)
# Rounding to 8 bits, of activations or of KV, turns a difference in an input's last bit into a
# whole step. A model of 135M parameters in bf16 was at 0.004 and 0.03; with KV in fp8 at 0.06 and
# 0.23; with weights and activations in int8 at 0.25 and 0.24, growing evenly from 0.01 on.
EIGHT_BITS = Limits(kl=0.5, apart=0.5)
FIRST_APART = 0.1  # of the first layer, which is the token's alone, in any case

T = TypeVar("T")


class Prefiller(ABC):
    """vLLM itself on one worker, asked as by its own scheduler, and without a request of anybody's.

    On tensor-parallel ranks every rank makes the same calls. room: how many tokens a prompt may
    have, its blocks being the first ones. eight_bits: whether activations are rounded to so
    few.
    """

    vocab: int
    room: int
    eight_bits: bool

    @abstractmethod
    def logits(self, token_ids: Sequence[int], held: int, count: int) -> torch.Tensor | None:
        """Logits [count, vocab] of the last tokens, the first `held` ones' KV being in their
        blocks; None on a rank that has none."""

    @abstractmethod
    def clear(self) -> None:
        """Leaves vLLM as it was found."""

    @abstractmethod
    def gathered(self, said: T) -> list[T]:
        """What each rank says, on every rank."""


@dataclass(frozen=True)
class Verdict:
    """off: why blending is not to be used, None: it is. kl: mean over the positions compared, by
    what was tried. apart: how far keys and values were from vLLM's own, the worst layer's."""

    off: str | None
    kl: Mapping[str, float]
    apart: float
    seconds: float

    def __str__(self) -> str:
        kl = ", ".join(f"{name} {value:.2g}" for name, value in self.kl.items())
        return f"KL {kl}; keys and values {self.apart:.2%} apart; {self.seconds:.1f} s"


@torch.inference_mode()
def self_test(worker: BlendWorker, vllm: Prefiller) -> Verdict:
    """Compares blending with vLLM's own prefill. Leaves nothing in the store or in vLLM.

    Errors of blending itself are a verdict, too.
    """
    began, off = time.perf_counter(), None
    trial = _Trial(worker, vllm)
    eight_bits = vllm.eight_bits or fp8_kind(worker.paged.attention) is not None
    try:
        trial(EIGHT_BITS if eight_bits else USUAL)
    except _Different as error:
        off = str(error)
    except Exception as error:
        off = f"the self-test failed: {type(error).__name__}: {one_line(error)}"
        vllm.gathered((off, None))  # where the other ranks are about to meet
    finally:
        vllm.clear()
    return Verdict(off, trial.kl, trial.apart, time.perf_counter() - began)


class _Different(Exception):
    """What differs; raised on all ranks."""


class _Trial:
    def __init__(self, worker: BlendWorker, vllm: Prefiller) -> None:
        names = {dtype: name for name, dtype in DTYPES.items()}
        plain = replace(worker.spec, dtype=names[worker.model.dtype])  # so that reuse is exact
        self.store, self.vllm = MemoryStore(), vllm
        self.worker = BlendWorker(worker.model, cast(KVStore, self.store), plain, worker.paged)
        self.kl: dict[str, float] = {}
        self.apart = 0.0

    def __call__(self, limits: Limits) -> None:
        size = min(TOKENS, self.vllm.room)
        if size < LEAST:
            raise _Different(f"vLLM's prompts of {size} tokens are too few for the self-test")
        prefix, other, a, b, separator, suffix = _parts(size, self.vllm.vocab)
        chunks = tuple((chunk.token_ids, chunk.chunk_id) for chunk in (a, b))
        with rounded(self.worker.model, self.worker.paged.attention):
            self.worker.save(SavePlan(prefix, chunks))
        for entries in self.meet(None, self.store.entries):
            self.store.entries |= entries
        same = lay_out(prefix, [a], separator, suffix)
        mixed = lay_out(other, [b, a], separator, suffix)
        options = BlendOptions.of(policy="question", min_tokens=0)
        tries = (
            ("reused", same, replace(options, mode="reuse")),
            ("recomputed", mixed, replace(options, ratios=(Decimal(1),))),
        )
        for name, prompt, how in tries:
            self.meet(self.compare(name, prompt, how, limits), None)

    def meet(self, problem: str | None, said: T) -> list[T]:
        """What each rank says. Raises _Different where one has a problem."""
        heard = self.vllm.gathered((problem, said))
        for other, _ in heard:
            if other is not None:
                raise _Different(other)
        return [value for _, value in heard]

    def compare(
        self, name: str, prompt: Prompt, options: BlendOptions, limits: Limits
    ) -> str | None:
        """vLLM's own prefill, and its suffix over blended KV; says what differs."""
        ids, count = prompt.token_ids, POSITIONS
        watch = KVWatch(self.worker.paged.attention, len(ids), self.worker.paged.block_size)
        plan = self.plan(name, prompt, options)
        with watch.watching():
            full = self.vllm.logits(ids, 0, count)
        again = self.vllm.logits(ids, plan.request.end, count)  # over KV of its own
        with watch.comparing(), rounded(self.worker.model, self.worker.paged.attention):
            self.worker.blend(plan)
            blended = self.vllm.logits(ids, plan.request.end, count)
        apart, most_kl = watch.apart(), limits.kl
        self.apart = max([self.apart, *apart.values()])
        if full is not None and again is not None and blended is not None:
            self.kl[name] = float(divergence(full, blended).mean())
            most_kl = max(limits.kl, NOISE * float(divergence(full, again).mean()))
        for place, (layer, far) in enumerate(apart.items()):
            limit = FIRST_APART if place < 2 else limits.apart
            if not far <= limit:
                off = f"{far:.0%} off vLLM's own (limit {limit:.0%})"
                return f"{name} chunks: {layer} are {off}"
        kl = self.kl.get(name, 0.0)
        if not kl <= most_kl:
            return f"{name} chunks: KL to vLLM's own prefill is {kl:.3g} (limit {most_kl:g})"
        return None

    def plan(self, name: str, prompt: Prompt, options: BlendOptions) -> BlendPlan:
        w = self.worker
        regime = w.model.rope.regime(len(prompt.token_ids))
        sources = find_sources(
            *(prompt, cast(KVStore, self.store), w.spec, regime, options.mode, False)
        )
        blocks = tuple(first_blocks(len(prompt.token_ids), w.paged.block_size))
        return BlendPlan(RequestPlan(name, prompt, options, save=False), sources, blocks, 0)


class KVWatch:
    """Keys and values on their way into vLLM's first blocks, whoever writes them.

    attention: vLLM's attention layers by name. tokens: of the one prompt whose blocks they are.
    """

    def __init__(self, attention: Mapping[str, Any], tokens: int, block_size: int) -> None:
        self._attention = attention
        self._tokens, self._first = tokens, FIRST_BLOCK * block_size
        self._own: dict[tuple[str, str], torch.Tensor] = {}  # vLLM's, by layer and what
        self._sums: dict[tuple[str, str], torch.Tensor] = {}  # float64 [2]: of difference, of own

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What is written now is what the rest is compared with."""

        def keep(name: str, what: str, places: torch.Tensor, x: torch.Tensor) -> None:
            own = self._own.get((name, what))
            if own is None:
                own = self._own[name, what] = x.new_zeros(self._tokens, *x.shape[1:])
            own[places] = x

        with self._seen(keep):
            yield

    @contextmanager
    def comparing(self) -> Iterator[None]:
        def compare(name: str, what: str, places: torch.Tensor, x: torch.Tensor) -> None:
            own = self._own.get((name, what))
            if own is None:
                return
            of, x = own[places].double(), x.double()
            sums = torch.stack([(x - of).square().sum(), of.square().sum()])
            self._sums[name, what] = self._sums.get((name, what), 0) + sums

        with self._seen(compare):
            yield

    def apart(self) -> dict[str, float]:
        """How far each layer's keys and values are, in the model's order. Empty where nothing was
        seen, as where a graph was replayed."""
        return {
            f"{what} of {name}": float((sums[0] / sums[1].clamp_min(1e-30)).sqrt())
            for (name, what), sums in self._sums.items()
        }

    @contextmanager
    def _seen(self, tell: Any) -> Iterator[None]:
        for name, layer in self._attention.items():
            layer.impl.do_kv_cache_update = self._wrapped(name, layer.impl.do_kv_cache_update, tell)
        try:
            yield
        finally:
            for layer in self._attention.values():
                del layer.impl.do_kv_cache_update  # the class's own is there again

    def _wrapped(self, name: str, update: Any, tell: Any) -> Any:
        def seen(layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> Any:
            places = slots.to(torch.int64) - self._first
            ours = ((places >= 0) & (places < self._tokens)).nonzero().flatten()
            for what, x in (("keys", key), ("values", value)):
                tell(name, what, places[ours], x[ours])
            return update(layer, key, value, kv_cache, slots)

        return seen


def first_blocks(tokens: int, block_size: int) -> range:
    return range(FIRST_BLOCK, FIRST_BLOCK + -(-tokens // block_size))


def _parts(size: int, vocab: int) -> tuple[Any, ...]:
    """Two prefixes, two chunks, a separator and a suffix, of random ids; at most `size` in all."""
    random = torch.Generator().manual_seed(size)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab, (count,), generator=random).tolist())

    prefix, suffix = size // 12, max(size // 16, POSITIONS)
    chunk = (size - prefix - suffix - 2) // 2
    a, b = PromptChunk(ids(chunk)), PromptChunk(ids(chunk))
    return ids(prefix), ids(prefix), a, b, ids(2), ids(suffix)
