"""Blending's counts in vLLM's own statistics: from its processes to its log and to /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from engine.vllm.metrics import COUNTERS, HISTOGRAMS, PREFIX, Tally


class BlendStats(KVConnectorStats):
    """`Tally.take`'s dicts, on their way."""

    @classmethod
    def taken(cls, tally: Tally) -> BlendStats | None:
        data = tally.take()
        return None if data is None else cls(data=data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> BlendStats:
        tally = Tally(self.data)
        tally.merge(other.data)
        self.data = tally.data()
        return self

    def reduce(self) -> dict[str, int | float]:
        return Tally(self.data).said()

    def is_empty(self) -> bool:
        return not Tally(self.data)


class BlendPromMetrics(KVConnectorPromMetrics):
    """One set of metrics an engine; what they count: `engine.vllm.metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            spec.name: counter(
                name=PREFIX + spec.name,
                documentation=spec.help,
                labelnames=[*labelnames, *([spec.label] if spec.label else [])],
            )
            for spec in COUNTERS
        }
        self._histograms = {
            spec.name: histogram(
                name=PREFIX + spec.name,
                documentation=spec.help,
                labelnames=labelnames,
                buckets=list(spec.buckets),
            )
            for spec in HISTOGRAMS
        }
        for values in per_engine_labelvalues.values():  # those without a label are there from 0 on
            for spec in COUNTERS:
                if not spec.label:
                    self._counters[spec.name].labels(*values)
            for made in self._histograms.values():
                made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for spec in COUNTERS:
            for label, amount in transfer_stats_data.get("counts", {}).get(spec.name, {}).items():
                own = [*values, label] if spec.label else values
                self._counters[spec.name].labels(*own).inc(amount)
        for histogram in HISTOGRAMS:
            for sample in transfer_stats_data.get("samples", {}).get(histogram.name, ()):
                self._histograms[histogram.name].labels(*values).observe(sample)
