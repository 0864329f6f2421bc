"""What blending counts, as plain numbers that vLLM carries from its processes to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.vllm.summary import RunSummary

PREFIX = "vllm:cacheblend_"
"""Beside vLLM's own metrics, and unregistered with them."""


@dataclass(frozen=True)
class CounterSpec:
    """label: the name of its label; "" for none."""

    name: str
    label: str
    help: str


@dataclass(frozen=True)
class HistogramSpec:
    name: str
    help: str
    buckets: tuple[float, ...]


COUNTERS = (
    CounterSpec(
        "requests",
        "outcome",
        "Requests. blended: with stored KV. held: blended before, and still in vLLM's blocks. "
        "full: they name chunks, and were computed all the same. failed: the blend was not "
        "possible, and they were computed. plain: they name no chunks. refused: they name them "
        "wrongly. off: blending is switched off.",
    ),
    CounterSpec(
        "chunks",
        "status",
        "Chunks in prompts. exact: stored KV that is exact where it stands. hit: stored KV that "
        "was blended. miss: none stored. computed: stored, but computed all the same.",
    ),
    CounterSpec("chunk_tokens", "status", "Their tokens."),
    CounterSpec("held_tokens", "", "Leading tokens that were in vLLM's blocks already."),
    CounterSpec("recomputed_tokens", "", "Tokens with stored KV that were computed to the end."),
    CounterSpec("loaded_bytes", "tier", "Stored KV that was loaded, from memory, disk or remote."),
    CounterSpec(
        "seconds",
        "part",
        "Time of blends. load: reading KV, added up over threads. stall: waiting for it. rotate, "
        "score, recompute: what their names say. total: from begin to end.",
    ),
    CounterSpec("saved_chunks", "", "Chunks that prompts missed, and that were stored then."),
    CounterSpec("failures", "what", "What went wrong: a blend, a save or an audit."),
)
HISTOGRAMS = (
    HistogramSpec(
        "blend_seconds",
        "Time of a blend, which all requests of the engine's step wait for.",
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
    ),
    HistogramSpec(
        "audit_kl",
        "Mean KL from full prefill, in nats, of the blends that were audited.",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
    ),
)

_SECONDS = ("load", "stall", "rotate", "score", "recompute", "total")

Counts = dict[str, dict[str, float]]
Samples = dict[str, list[float]]


class Tally:
    """Counts since the last time it was taken: {metric: {label's value: number}}, and samples of
    histograms."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        """data: what `take` gave."""
        given = data or {}
        self.counts: Counts = {name: dict(by) for name, by in given.get("counts", {}).items()}
        self.samples: Samples = {name: list(s) for name, s in given.get("samples", {}).items()}

    def __bool__(self) -> bool:
        return bool(self.counts or self.samples)

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        if amount:
            by = self.counts.setdefault(name, {})
            by[label] = by.get(label, 0) + amount

    def observe(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def request(self, outcome: str) -> None:
        """Counts one that was not looked into further: plain, refused or off."""
        self.add("requests", 1, outcome)

    def summary(self, done: RunSummary) -> None:
        """Counts a request that names chunks, once it has ended."""
        self.add("requests", 1, done.outcome)
        for segment in done.segments:
            if segment.kind == "chunk":
                self.add("chunks", 1, segment.status)
                self.add("chunk_tokens", segment.end - segment.start, segment.status)
        self.add("held_tokens", done.held)
        self.add("recomputed_tokens", done.recomputed)
        for tier, size in done.tiers:
            self.add("loaded_bytes", size, tier)
        for part in _SECONDS:
            self.add("seconds", getattr(done.seconds, part), part)
        if done.outcome == "blended":
            self.observe("blend_seconds", done.seconds.total)
        if done.outcome == "failed":
            self.add("failures", 1, "blend")

    def merge(self, data: Mapping[str, Any]) -> None:
        """Adds what another one took."""
        for name, by in data.get("counts", {}).items():
            for label, amount in by.items():
                self.add(name, amount, label)
        for name, values in data.get("samples", {}).items():
            self.samples.setdefault(name, []).extend(values)

    def data(self) -> dict[str, Any]:
        """Plain dicts, lists, texts and numbers."""
        return {"counts": self.counts, "samples": self.samples}

    def take(self) -> dict[str, Any] | None:
        """The same, None for nothing; from then on it counts anew."""
        if not self:
            return None
        taken = self.data()
        self.counts, self.samples = {}, {}
        return taken

    def said(self) -> dict[str, int | float]:
        """A few numbers, for a line in a log."""
        shown: dict[str, int | float] = {
            f"{label or 'all'} {name.replace('_', ' ')}": round(amount, 3)
            for name in ("requests", "chunk_tokens", "recomputed_tokens", "saved_chunks")
            for label, amount in sorted(self.counts.get(name, {}).items())
        }
        audits = self.samples.get("audit_kl", [])
        if audits:
            shown["mean audit KL"] = round(sum(audits) / len(audits), 4)
        return shown
