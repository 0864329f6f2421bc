"""What vLLM carries between the connector's two sides."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from engine.vllm.plan import StepPlan
from engine.vllm.summary import RunSummary


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, before a step."""

    plan: StepPlan


@dataclass
class ResultMetadata(KVConnectorWorkerMetadata):
    """From a worker to the scheduler, after a step. off: why it no longer blends."""

    summaries: tuple[RunSummary, ...]
    off: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ResultMetadata:
        """All ranks tell the same: one that failed counts, else the first."""
        assert isinstance(other, ResultMetadata)
        merged = {summary.request_id: summary for summary in other.summaries}
        for summary in self.summaries:
            theirs = merged.get(summary.request_id)
            if theirs is None or theirs.outcome != "failed":
                merged[summary.request_id] = summary
        return ResultMetadata(tuple(merged.values()), self.off or other.off)


@dataclass
class WorkerState(KVConnectorHandshakeMetadata):
    """off: why a worker can't blend, None if it can."""

    off: str | None
