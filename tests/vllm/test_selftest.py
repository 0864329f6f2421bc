"""The self-test at start: it stays out of the way of what is right, and notices what is not."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import engine.rope
from cache_store.errors import UsageError
from engine.attention import AttentionPlan
from engine.vllm.decoder import VllmDecoder
from engine.vllm.host import CacheBlendWorker
from engine.vllm.paged import PagedKV
from engine.vllm.runner import WorkerPrefiller
from engine.vllm.selftest import self_test
from tests.vllm.worlds import FAMILIES, Served, ids, make_text

TESTED = {"self_test": True}
TEXT = make_text()


@pytest.fixture(scope="module")
def served(start: Callable[..., Served]) -> Served:
    return start("llama", extra=TESTED)


def verdict_on(served: Served) -> Any:
    """The self-test's verdict on a vLLM that runs, but has nothing to do."""
    served.forget()
    worker = served.core.model_executor.driver_worker.worker
    return self_test(
        served.connector.worker, WorkerPrefiller(worker, served.connector.worker.paged)
    )


def test_blending_as_it_is_stays_on_and_leaves_no_trace(served: Served) -> None:
    assert served.scheduler.connector.off is None
    with served.open_store() as store:
        assert store.stats().entries == 0
    runner = served.core.model_executor.driver_worker.worker.model_runner
    assert not runner.requests
    assert not served.runs
    layers = served.connector.worker.paged.attention.values()
    assert not any(layer.kv_cache.any() for layer in layers)
    served.ask(TEXT.prompt([0, 1, 2, 3]))
    served.ask(TEXT.prompt([3, 1, 2, 0]), ratio=0.5)
    assert len(served.runs) == 1


def test_a_running_vllm_agrees_closely(served: Served) -> None:
    verdict = verdict_on(served)
    assert verdict.off is None
    assert set(verdict.kl) == {"reused", "recomputed"}
    assert max(verdict.kl.values()) < 1e-6
    assert 0 < verdict.apart < 1e-3  # that of float32, seen in every layer


def _turned(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine.rope.inverse_frequencies

    def wrong(*args: Any) -> Any:
        frequencies, scale = right(*args)
        return frequencies * 1.05, scale

    monkeypatch.setattr(engine.rope, "inverse_frequencies", wrong)


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = VllmDecoder.keys_values

    def wrong(*args: Any) -> Any:
        k, v = right(*args)
        return k.flip(1).contiguous(), v

    monkeypatch.setattr(VllmDecoder, "keys_values", wrong)


def _normed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = VllmDecoder.norm_in

    def wrong(self: VllmDecoder, layer: int, x: torch.Tensor) -> torch.Tensor:
        return right(self, layer, x) * (1.5 if layer == 2 else 1)

    monkeypatch.setattr(VllmDecoder, "norm_in", wrong)


def _leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token sees the prompt's end, as with a mask that isn't by position."""
    right = VllmDecoder.attend

    def wrong(self: VllmDecoder, layer: int, q: Any, cache: Any, plan: AttentionPlan) -> Any:
        last = self.plan([int(plan.positions[-1])] * len(plan.positions))
        return right(self, layer, q, cache, last)

    monkeypatch.setattr(VllmDecoder, "attend", wrong)


def _misplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PagedKV.slots

    def wrong(self: PagedKV, blocks: Any, first: int, end: int) -> torch.Tensor:
        return right(self, blocks, first, end).roll(1)

    monkeypatch.setattr(PagedKV, "slots", wrong)


def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Any:
        raise RuntimeError("no such kernel\nin any library")

    monkeypatch.setattr(VllmDecoder, "finish", wrong)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_turned, "keys of model.layers.0.self_attn.attn"),
        (_swapped, "keys of model.layers.0.self_attn.attn"),
        (_normed, "model.layers.2.self_attn.attn"),
        (_leaking, "off vLLM's own"),
        (_misplaced, "off vLLM's own"),
        (_failing, "RuntimeError: no such kernel"),
    ],
)
def test_what_computes_something_else_is_noticed(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[pytest.MonkeyPatch], None],
    said: str,
) -> None:
    before = served.connector.worker.model.rope._tables
    served.connector.worker.model.rope._tables = {}
    damage(monkeypatch)
    verdict = verdict_on(served)
    served.connector.worker.model.rope._tables = before
    assert said in (verdict.off or "")
    assert "\n" not in (verdict.off or "")
    monkeypatch.undo()
    assert verdict_on(served).off is None  # nothing of it stays


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_every_family_stays_on(start: Callable[..., Served], family: str) -> None:
    served = start(family, extra=TESTED)
    assert served.scheduler.connector.off is None


def test_where_it_fails_vllm_answers_as_without_the_connector(
    start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = TEXT.prompt([0, 1, 2, 3]), TEXT.prompt([3, 1, 2, 0])
    alone = start("llama", connector=False)
    expected = [alone.ask(p.token_ids, steps=4) for p in (prompt, other)]
    _swapped(monkeypatch)
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level("WARNING"):
        served = start("llama", extra=TESTED)
    assert [line for line in lines(caplog) if line.startswith("cacheblend: off: ")]
    for asked, answer in zip((prompt, other), expected, strict=True):
        found = served.ask(asked, steps=4, ratio=0)
        assert found.token_ids == answer.token_ids
        assert torch.equal(found.logprobs, answer.logprobs)
    assert served.ask(ids(50, 3), steps=2).token_ids
    assert not served.runs
    with served.open_store() as store:
        assert store.stats().entries == 0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith("cacheblend: ")]


def test_what_blending_cannot_be_used_with_is_refused_before_weights_are_loaded(
    start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    loaded: list[Any] = []
    monkeypatch.setattr(CacheBlendWorker, "load_model", lambda *args, **named: loaded.append(args))
    with pytest.raises(UsageError, match="LoRA"), caplog.at_level("ERROR"):
        start("llama", enable_lora=True)
    assert not loaded
    assert [line for line in lines(caplog) if "merge the adapter" in line]


def test_another_worker_leaves_vllm_plain_and_says_which_one_is_needed(
    start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level("WARNING"):
        served = start("llama", worker_cls="auto")
    assert [line for line in lines(caplog) if "engine.vllm.host.CacheBlendWorker" in line]
    assert served.ask(TEXT.prompt([0, 1]), steps=2).token_ids
    assert not served.runs
