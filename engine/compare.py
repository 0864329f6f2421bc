"""A blend against full prefill of the same token ids: how much sooner, how much the same."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.forward import Capture, forward
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.rope import Tables
from engine.timing import synchronize

FORCED_TOKENS = 16  # along full prefill's greedy answer, or to its end


@dataclass(frozen=True)
class Reference:
    """Full prefill of one prompt and its greedy continuation.

    tokens: the K greedy ones, at most as many as were asked for; logits: float32 [K, vocab], what
    each was chosen from. cache is filled up to the prompt's end.
    """

    ttft_s: float
    logits: torch.Tensor
    tokens: tuple[int, ...]
    cache: KVCache
    tables: Tables


@dataclass(frozen=True)
class Agreement:
    """KL(full || other) in nats, at the first token and on average; share of equal top tokens;
    index of the first token that differs, where the other's own greedy answer leaves the
    reference's (None: it doesn't within these tokens). greedy: that answer, as far as it is known
    from these tokens: up to where it leaves, included. kl: at each of the reference's tokens."""

    kl_first: float
    kl_mean: float
    top1: float
    differs_at: int | None
    greedy: tuple[int, ...]
    kl: tuple[float, ...] = ()


def reference(
    model: Decoder,
    token_ids: Sequence[int],
    end_ids: Collection[int],
    capacity: int | None = None,
    tokens: int = FORCED_TOKENS,
    capture: Capture | None = None,
) -> Reference:
    """Prefills the whole prompt, timed, and decodes greedily up to `tokens` tokens.

    capacity: of its KV cache (default: prompt and tokens); a smaller one gives fewer tokens.
    capture: of the prompt's K and V, see `forward`.
    """
    capacity = len(token_ids) + tokens if capacity is None else capacity
    count = min(tokens, capacity - len(token_ids) + 1)
    began = time.perf_counter()
    cache = model.new_cache(capacity)
    tables = model.rope.tables(len(token_ids), capacity)
    logits = forward(model, cache, token_ids, tables, capture=capture)
    synchronize(model.device)
    ttft = time.perf_counter() - began
    greedy = [int(logits.argmax())]
    while len(greedy) < count and greedy[-1] not in end_ids:
        greedy.append(int(forward(model, cache, greedy[-1:], tables).argmax()))
    cache.length = len(token_ids)
    logits = _forced(model, cache, tables, logits, greedy)
    return Reference(ttft, logits, tuple(greedy), cache, tables)


def _forced(
    model: Decoder, cache: KVCache, tables: Tables, logits: torch.Tensor, tokens: Sequence[int]
) -> torch.Tensor:
    """Logits [K, vocab] at each of K `tokens`, all but the last fed in one step.

    Both sides of a comparison go this way: in bf16 another number of rows rounds otherwise. The
    cache keeps its length; the rows past it are overwritten.
    """
    length = cache.length
    if len(tokens) > 1:
        logits = torch.cat([logits, forward(model, cache, tokens[:-1], tables, last=None)])
        cache.length = length
    return logits


def agreement(
    model: Decoder, cache: KVCache, tables: Tables, logits: torch.Tensor, full: Reference
) -> Agreement:
    """Feeds the reference's tokens to another KV cache of the same prompt.

    logits: float32 [1, vocab] after that prompt. The cache keeps its length; past it, it holds the
    KV of all the reference's tokens but the last.
    """
    return agreement_of(full.logits, _forced(model, cache, tables, logits, full.tokens))


def agreement_of(full: torch.Tensor, other: torch.Tensor) -> Agreement:
    """From the logits, float32 [K, vocab], at each of the K tokens of full prefill's answer."""
    kl = divergence(full, other)
    top = full.argmax(-1).tolist(), other.argmax(-1).tolist()
    same = [a == b for a, b in zip(*top, strict=True)]
    apart = first_divergence(*top)
    greedy = tuple(top[1] if apart is None else top[1][: apart + 1])
    agreed = sum(same) / len(same)
    return Agreement(float(kl[0]), float(kl.mean()), agreed, apart, greedy, tuple(kl.tolist()))


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(full || other) in nats per row of logits [K, vocab], float64 [K]."""
    # On the host: not every device has float64.
    p, q = full.cpu().double().log_softmax(-1), other.cpu().double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first output token that differs; None for equal answers."""
    if tuple(one) == tuple(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
