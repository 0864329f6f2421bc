"""A blend against full prefill of the same token ids: how much sooner, how much the same."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.forward import forward
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.rope import Tables
from engine.timing import synchronize

FORCED_TOKENS = 16  # along full prefill's greedy answer, or to its end


@dataclass(frozen=True)
class Reference:
    """Full prefill of one prompt and its greedy continuation.

    tokens: the K = 1..16 greedy ones; logits: float32 [K, vocab], what each was chosen from. cache
    is filled up to the prompt's end.
    """

    ttft_s: float
    logits: torch.Tensor
    tokens: tuple[int, ...]
    cache: KVCache
    tables: Tables


@dataclass(frozen=True)
class Agreement:
    """KL(full || other) in nats, at the first token and on average; share of equal top tokens."""

    kl_first: float
    kl_mean: float
    top1: float


def reference(
    model: Decoder,
    token_ids: Sequence[int],
    end_ids: Collection[int],
    capacity: int | None = None,
) -> Reference:
    """Prefills the whole prompt, timed, and decodes greedily up to 16 tokens.

    capacity: of its KV cache (default: prompt and 16 tokens); a smaller one gives fewer tokens.
    """
    capacity = len(token_ids) + FORCED_TOKENS if capacity is None else capacity
    count = min(FORCED_TOKENS, capacity - len(token_ids) + 1)
    began = time.perf_counter()
    cache = model.new_cache(capacity)
    tables = model.rope.tables(len(token_ids), capacity)
    logits = forward(model, cache, token_ids, tables)
    synchronize(model.device)
    ttft = time.perf_counter() - began
    tokens = [int(logits.argmax())]
    while len(tokens) < count and tokens[-1] not in end_ids:
        tokens.append(int(forward(model, cache, tokens[-1:], tables).argmax()))
    cache.length = len(token_ids)
    logits = _forced(model, cache, tables, logits, tokens)
    return Reference(ttft, logits, tuple(tokens), cache, tables)


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

    logits: float32 [1, vocab] after that prompt. The cache keeps its length.
    """
    logits = _forced(model, cache, tables, logits, full.tokens)
    kl = divergence(full.logits, logits)
    same = (full.logits.argmax(-1) == logits.argmax(-1)).float().mean()
    return Agreement(float(kl[0]), float(kl.mean()), float(same))


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
