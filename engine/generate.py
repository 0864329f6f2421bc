"""Decoding: output tokens one by one over a filled KV cache."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine.forward import forward
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.options import SamplingOptions
from engine.rope import Tables

FinishReason = Literal["stop", "length"]


class TextStream(Protocol):
    """Turns token ids into text that is safe to show; see `engine.tokenizer.StreamDecoder`."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Generated:
    """An answer. token_ids leaves out the id that ended it; first_id is the first one drawn, even
    if it ended the answer."""

    first_id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    seconds: float


def generate(
    model: Decoder,
    cache: KVCache,
    tables: Tables,
    logits: torch.Tensor,
    options: SamplingOptions,
    stream: TextStream,
    end_ids: Collection[int],
    on_text: Callable[[str], None] | None = None,
) -> Generated:
    """Decodes from the prompt's last logits float32 [1, vocab], appending to `cache`.

    Ends at one of `end_ids`, at a stop string (which is not part of the text), at
    `options.max_tokens` or where the cache is full. on_text gets each piece of text as soon as it
    can no longer turn out to be half a character or the beginning of a stop string.
    """
    began = time.perf_counter()
    sampler = Sampler(options)
    text = StopText(options.stop, on_text or (lambda piece: None))
    ids: list[int] = []
    first: int | None = None
    reason: FinishReason = "length"
    limit = min(options.max_tokens, cache.capacity - cache.length)
    while len(ids) < limit:
        token = sampler(logits[0])
        first = token if first is None else first
        if token in end_ids:
            reason = "stop"
            break
        ids.append(token)
        if text.push(stream.push(token)):
            reason = "stop"
            break
        if len(ids) < limit:
            logits = forward(model, cache, [token], tables)
    if not text.stopped and text.push(stream.finish()):
        reason = "stop"
    seconds = time.perf_counter() - began
    first = int(logits[0].argmax()) if first is None else first  # a cache without room for one
    return Generated(first, tuple(ids), text.finish(), reason, seconds)


class Sampler:
    """Chooses the next token: greedy, or sampled after temperature, top-k and top-p."""

    def __init__(self, options: SamplingOptions) -> None:
        self.options = options
        self.generator = torch.Generator().manual_seed(options.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """float32 [vocab] -> token id."""
        o = self.options
        if o.temperature == 0:
            return int(logits.argmax())
        scaled = (logits.cpu() - logits.max().cpu()).double() / o.temperature
        probabilities, order = scaled.softmax(0).sort(descending=True, stable=True)
        if o.top_k:
            probabilities = probabilities[: o.top_k]
        if o.top_p < 1:  # the smallest set whose probability reaches top_p
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < o.top_p * probabilities.sum()]
        return int(order[torch.multinomial(probabilities, 1, generator=self.generator)])


class StopText:
    """Passes text on, holding back what may yet become a stop string."""

    def __init__(self, stops: Collection[str], on_text: Callable[[str], None]) -> None:
        self._stops, self._on_text = tuple(stops), on_text
        self._shown: list[str] = []
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> bool:
        """Adds text; True once a stop string has appeared (what follows it is dropped)."""
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            self._show(len(self._held))
        else:
            self._show(len(self._held) - self._undecided())
        return self.stopped

    def finish(self) -> str:
        """Shows what was held back and returns the whole text."""
        self._show(len(self._held))
        return "".join(self._shown)

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        lengths = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(lengths, default=0)

    def _show(self, size: int) -> None:
        if size:
            piece, self._held = self._held[:size], self._held[size:]
            self._shown.append(piece)
            self._on_text(piece)
