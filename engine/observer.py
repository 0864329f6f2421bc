"""Who watches a prompt while it is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.prompt import Prompt
    from engine.timing import Stopwatch


class Observer(Protocol):
    """Told how a prompt goes on, a few times in all, in the thread that computes it: what is done
    here adds to its time, and what is raised ends it.

    Layers are not told of one by one. They are in the stopwatch as they come, which any other
    thread may look into whenever it likes (`engine.trace.spans.spans_of`), so that watching never
    holds up computing, nor a thread that loads.
    """

    def prefill(self, prompt: Prompt, watch: Stopwatch, began: float) -> None:
        """A prefill begins, timed by `watch`, its times counting from `began` (seconds of
        `time.perf_counter`). Again, where a damaged entry made it begin anew."""

    def prefilled(self, seconds: float) -> None:
        """The first token's logits are there, after so many seconds."""

    def phase(self, name: str) -> None:
        """What comes then: "compare", "decode", and "finish" for what is done after the answer."""
