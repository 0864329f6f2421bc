"""Ctrl-C while a turn is computed: it ends an answer, and gives up a turn that has none yet."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.prompt import Prompt
    from engine.timing import Stopwatch


class Stopper:
    """Knows how far a turn is, as its observer (`engine.observer`). `asked`: whether the answer is
    to end."""

    def __init__(self) -> None:
        self.asked = False
        self._answering = False

    def prefill(self, prompt: Prompt, watch: Stopwatch, began: float) -> None:
        self._answering = False

    def prefilled(self, seconds: float) -> None:
        """The first token is known, and will be shown."""

    def phase(self, name: str) -> None:
        self._answering = name in ("decode", "finish")

    def __call__(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """Ctrl-C was pressed; a second time it is meant."""
        if not self._answering or self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopping() -> Iterator[Stopper]:
    """Within, Ctrl-C is the stopper's."""
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():
        yield stopper
        return
    before = signal.signal(signal.SIGINT, stopper)
    try:
        yield stopper
    finally:
        signal.signal(signal.SIGINT, before)
