"""Blending's metrics as vLLM's own Prometheus code takes them."""

from functools import partial
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.vllm.metrics import PREFIX, Tally
from engine.vllm.prometheus import BlendPromMetrics, BlendStats
from tests.engine.vllm.test_metrics import done


def test_prometheus_shows_them_an_engine() -> None:
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = BlendPromMetrics(
        config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    tally = Tally()
    tally.summary(done())
    stats = BlendStats.taken(tally)
    assert stats is not None
    assert not stats.is_empty()
    more = BlendStats(data={})
    assert more.is_empty()
    metrics.observe(more.aggregate(stats).to_dict(), 1)
    metrics.observe(stats.to_dict(), 1)

    def value(name: str, engine: str, **labels: str) -> float | None:
        own = {"model_name": "m", "engine": engine, **labels}
        return registry.get_sample_value(PREFIX + name, own)

    assert value("chunk_tokens_total", "1", status="hit") == 400
    assert value("chunk_tokens_total", "0", status="hit") is None
    assert value("saved_chunks_total", "0") == 0
    assert value("blend_seconds_count", "1") == 2
    assert value("audit_kl_count", "1") == 0
