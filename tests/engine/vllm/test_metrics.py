"""What is counted of blended requests, on its way from vLLM's processes to Prometheus."""

import json

from engine.options import BlendOptions
from engine.vllm.metrics import COUNTERS, HISTOGRAMS, Tally
from engine.vllm.summary import Outcome, RunSummary, Seconds, SegmentSummary


def done(outcome: Outcome = "blended", **changes: object) -> RunSummary:
    segments = (
        SegmentSummary("prefix", None, None, 0, 10, "exact"),
        SegmentSummary("chunk", "a", None, 10, 110, "exact"),
        SegmentSummary("separator", None, None, 110, 112, "computed"),
        SegmentSummary("chunk", "b", None, 112, 312, "hit"),
        SegmentSummary("chunk", "c", None, 312, 362, "miss", "not_stored"),
        SegmentSummary("suffix", None, None, 362, 370, "computed"),
    )
    given = {
        "request_id": "r",
        "outcome": outcome,
        "options": BlendOptions(),
        "segments": segments,
        "prompt_tokens": 370,
        "end": 362,
        "held": 16,
        "recomputed": 32,
        "seconds": Seconds(load=0.5, stall=0.25, total=1.0),
        "tiers": (("disk", 3000), ("memory", 0)),
        **changes,
    }
    return RunSummary(**given)  # type: ignore[arg-type]


def test_counts_chunks_and_their_tokens_by_where_their_kv_came_from() -> None:
    tally = Tally()
    tally.summary(done())
    assert tally.counts["requests"] == {"blended": 1}
    assert tally.counts["chunks"] == {"exact": 1, "hit": 1, "miss": 1}
    assert tally.counts["chunk_tokens"] == {"exact": 100, "hit": 200, "miss": 50}
    assert tally.counts["recomputed_tokens"] == {"": 32}
    assert tally.counts["held_tokens"] == {"": 16}
    assert tally.counts["loaded_bytes"] == {"disk": 3000}
    assert tally.counts["seconds"] == {"load": 0.5, "stall": 0.25, "total": 1.0}
    assert tally.samples["blend_seconds"] == [1.0]
    assert "failures" not in tally.counts


def test_a_blend_that_failed_is_a_failure_and_no_sample() -> None:
    tally = Tally()
    tally.summary(done("failed"))
    assert tally.counts["failures"] == {"blend": 1}
    assert not tally.samples


def test_what_was_taken_is_not_counted_again() -> None:
    tally = Tally()
    assert tally.take() is None
    tally.request("plain")
    tally.observe("audit_kl", 0.5)
    first = tally.take()
    assert first == {"counts": {"requests": {"plain": 1}}, "samples": {"audit_kl": [0.5]}}
    assert tally.take() is None
    tally.request("plain")
    assert tally.take() == {"counts": {"requests": {"plain": 1}}, "samples": {}}


def test_merging_adds_up_and_leaves_the_other_as_it_was() -> None:
    one, other = Tally(), Tally()
    for tally in (one, other):
        tally.summary(done())
        tally.add("saved_chunks", 2)
    taken = other.data()
    before = json.dumps(taken)
    one.merge(taken)
    one.merge(taken)
    assert one.counts["chunk_tokens"]["hit"] == 600
    assert one.counts["saved_chunks"] == {"": 6}
    assert one.samples["blend_seconds"] == [1.0, 1.0, 1.0]
    assert json.dumps(taken) == before


def test_survives_json_as_vllm_sends_it() -> None:
    tally = Tally()
    tally.summary(done())
    data = tally.data()
    assert json.loads(json.dumps(data)) == data
    assert Tally(json.loads(json.dumps(data))).counts == tally.counts


def test_everything_that_is_counted_is_declared() -> None:
    tally = Tally()
    for outcome in ("blended", "held", "full", "failed"):
        tally.summary(done(outcome))
    tally.request("off")
    tally.observe("audit_kl", 0.1)
    tally.add("saved_chunks")
    labels = {spec.name: spec.label for spec in COUNTERS}
    for name, by in tally.counts.items():
        assert (set(by) == {""}) == (labels[name] == ""), name
    assert set(tally.samples) <= {spec.name for spec in HISTOGRAMS}


def test_what_a_log_line_says_is_short() -> None:
    tally = Tally()
    tally.summary(done())
    tally.observe("audit_kl", 0.5)
    said = tally.said()
    assert said["blended requests"] == 1
    assert said["hit chunk tokens"] == 200
    assert said["mean audit KL"] == 0.5
