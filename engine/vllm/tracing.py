"""Who learns of each blend in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.vllm.plan import BlendPlan
    from engine.vllm.worker import BlendRun


class RunListener(Protocol):
    """Told in the worker's process, before vLLM's own forward: what is done here adds to the time
    of all requests of the step."""

    def ran(self, run: BlendRun) -> None:
        """A request's KV is in its blocks."""

    def failed(self, plan: BlendPlan, error: Exception) -> None:
        """It is not; vLLM computes the request."""
