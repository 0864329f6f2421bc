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

FinishReason = Literal["stop", "length", "interrupted"]


class TextStream(Protocol):
    """Turns token ids into text that is safe to show; see `engine.detokenizer.StreamDecoder`."""

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
    interrupted: Callable[[], bool] = lambda: False,
) -> Generated:
    """Decodes from the prompt's last logits float32 [1, vocab], appending to `cache`.

    Ends at one of `end_ids`, at a stop string (which is not part of the text), at
    `options.max_tokens`, where the cache is full, or once it is `interrupted`. on_text gets each
    piece of text as soon as it can no longer turn out to be half a character or the beginning of a
    stop string.
    """
    began = time.perf_counter()
    sampler = Sampler(options)
    answer = Answer(options, stream, end_ids, on_text)
    limit = min(options.max_tokens, cache.capacity - cache.length)
    while len(answer.token_ids) < limit:
        if answer.token_ids and interrupted():
            answer.interrupt()
            break
        token = sampler(logits[0])
        if answer.push(token):
            break
        if len(answer.token_ids) < limit:
            logits = forward(model, cache, [token], tables)
    if answer.first_id is None:  # a cache without room for one
        answer.first_id = int(logits[0].argmax())
    return answer.finish(lambda: time.perf_counter() - began)


class Answer:
    """An answer as it grows, token by token; see `generate` for where it ends."""

    def __init__(
        self,
        options: SamplingOptions,
        stream: TextStream,
        end_ids: Collection[int],
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self.token_ids: list[int] = []
        self.first_id: int | None = None
        self._end_ids, self._stream = end_ids, stream
        self._text = StopText(options.stop, on_text or (lambda piece: None))
        self._reason: FinishReason = "length"

    def push(self, token: int) -> bool:
        """Adds a token; True where the answer ends with it."""
        self.first_id = token if self.first_id is None else self.first_id
        if token in self._end_ids:
            self._reason = "stop"
            return True
        self.token_ids.append(token)
        if self._text.push(self._stream.push(token)):
            self._reason = "stop"
        return self._text.stopped

    def interrupt(self) -> None:
        """No more tokens are wanted."""
        self._reason = "interrupted"

    def finish(self, seconds: Callable[[], float]) -> Generated:
        """The whole of it. seconds: that it took, asked once all text is known."""
        if not self._text.stopped and self._text.push(self._stream.finish()):
            self._reason = "stop"
        assert self.first_id is not None
        took = seconds()
        return Generated(
            self.first_id, tuple(self.token_ids), self._text.finish(), self._reason, took
        )


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
