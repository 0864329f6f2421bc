"""Texts as chunks: what was encoded lately is kept."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cache_store.keys import chunk_id
from engine.prompt import PromptChunk
from engine.tokenizer import Tokenizer

MOST_TOKENS = 2_000_000
"""Of all that is kept: about 100 MB with their texts."""


class KeptChunks:
    """Encodes texts; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, most: int = MOST_TOKENS) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._kept: OrderedDict[tuple[str, str | None], PromptChunk] = OrderedDict()
        self._lock = threading.Lock()
        self.tokens = 0  # of what is kept

    def chunk(self, text: str, source: str | None) -> PromptChunk:
        with self._lock:
            kept = self._kept.get((text, source))
            if kept is not None:
                self._kept.move_to_end((text, source))
                return kept
        made = PromptChunk(tuple(self._tokenizer.encode(text)), chunk_id(text), source)
        with self._lock:
            if (text, source) not in self._kept:
                self._kept[text, source] = made
                self.tokens += _size(made)
            while self.tokens > self._most:
                _, gone = self._kept.popitem(last=False)
                self.tokens -= _size(gone)
        return made


def _size(chunk: PromptChunk) -> int:
    return len(chunk.token_ids) + 1  # texts that no token spells are not for nothing
