"""What a worker does with the scheduler's plans, and what is kept of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.timing import Stopwatch
from engine.vllm.plan import BlendPlan, SavePlan, StepPlan
from engine.vllm.steps import PATIENCE, WEIGHTS_CHANGED, StepRunner
from engine.vllm.tails import TailedKV
from engine.vllm.worker import BlendRun
from tests.engine.vllm.streams import Names, chunk, request, scheduler

A, B = chunk(1), chunk(2)  # a prompt of both is blended up to token 83
LAYERS, HEADS, DIM, SIZE = 2, 2, 4, 16


def plan(name="r", held=0, salt="s"):
    side = scheduler(Names([A, B]))
    asked = request(name, [A, B])
    side.arrived(asked)
    side.allocated(asked, range(100, 107), side.matched(asked, held))
    (made,) = side.step(busy=True).blends
    return BlendPlan(made.request, made.sources, made.block_ids, held, salt)


class Worker:
    """Blends nothing; `trouble(plan)` may raise."""

    def __init__(self, trouble=lambda plan: None):
        self.trouble, self.plans, self.saved = trouble, [], []

    def blend(self, plan):
        self.plans.append(plan)
        self.trouble(plan)
        blended = SimpleNamespace(selected=(5,), per_layer=(1, 1))
        return BlendRun(plan, plan.sources, blended, Stopwatch(), 0, {}, 0.5)

    def save(self, plan):
        self.trouble(plan)
        self.saved.append(plan)
        return 1

    def agreed(self, yes):
        return yes


def fails(plan):
    raise RuntimeError("no luck")


def fails_with_stored_kv(plan):
    if any(source.match for source in plan.sources):
        fails(plan)


class TestBlends:
    def run(self, worker, *plans):
        said = []
        runner = StepRunner(worker, SIZE, said.append)
        return runner.blend(StepPlan(plans)), said

    def test_it_says_what_was_done(self):
        done, said = self.run(Worker(), plan())
        (summary,) = done.summaries
        assert (summary.outcome, summary.recomputed, summary.seconds.total) == ("blended", 1, 0.5)
        assert not done.failed_blocks
        assert not said

    def test_kv_that_was_lost_meanwhile_is_told_of(self):
        class Loses(Worker):
            def blend(self, plan):
                run = super().blend(plan)
                return replace(run, sources=tuple(s.computed() for s in plan.sources))

        done, _ = self.run(Loses(), plan())
        assert "lost meanwhile" in done.summaries[0].to_json()["notes"][0]
        assert self.run(Worker(), plan())[0].summaries[0].notes == ()

    def test_what_fails_is_computed_at_once(self):
        worker = Worker(fails_with_stored_kv)
        done, said = self.run(worker, plan())
        (summary,) = done.summaries
        assert (summary.outcome, summary.why) == ("failed", "RuntimeError: no luck")
        assert summary.options.policy == "value"
        assert summary.tokens("computed") == 80
        assert not done.failed_blocks
        assert worker.plans[1].block_ids == worker.plans[0].block_ids
        assert len(said) == 1

    @pytest.mark.parametrize("worker", [None, Worker(fails)])
    def test_where_that_fails_too_the_blocks_are_vllms(self, worker):
        done, said = self.run(worker, plan("1", held=48), plan("2"))
        assert [s.outcome for s in done.summaries] == ["failed", "failed"]
        assert done.failed_blocks == set(range(100, 107))
        done, _ = self.run(worker, plan(held=48))
        assert done.failed_blocks == set(range(103, 107))
        assert all("\n" not in line for line in said)


class TestSaves:
    def test_a_store_that_failed_is_left_alone_for_a_while(self):
        said, now = [], [0.0]
        worker = Worker(fails)
        runner = StepRunner(worker, SIZE, said.append, clock=lambda: now[0])
        wanted = StepPlan(saves=(SavePlan((), ((A, None),)), SavePlan((), ((B, None),))))
        runner.save(wanted)
        runner.save(wanted)
        assert len(said) == 1
        worker.trouble = lambda plan: None
        runner.save(wanted)
        assert not worker.saved
        now[0] = PATIENCE + 1
        runner.save(wanted)
        assert worker.saved == list(wanted.saves)


class TestRest:
    def test_of_other_weights_nothing_is_blended_or_saved(self):
        said, worker, kept = [], Worker(), []
        runner = StepRunner(worker, SIZE, said.append)
        runner.tails = SimpleNamespace(
            restore=lambda plan: True, keep=kept.append, forget=kept.append
        )
        runner.weights_changed()
        runner.weights_changed()
        asked = plan()
        (summary,) = runner.blend(StepPlan((asked,))).summaries
        assert (summary.outcome, summary.why) == ("failed", WEIGHTS_CHANGED)
        assert not any(source.match for source in worker.plans[0].sources)
        assert kept == [asked], "what was kept of it is forgotten"
        runner.auditor = fails
        runner.save(StepPlan((), (SavePlan((), ()),)))
        runner.audit(StepPlan((), (), (None,)))
        assert not worker.saved
        assert said == [WEIGHTS_CHANGED]

    def test_nothing_is_saved_while_vllm_sleeps(self):
        worker = Worker()
        runner = StepRunner(worker, SIZE, lambda line: None)
        for runner.asleep in (True, False):
            runner.save(StepPlan((), (SavePlan((), ()),)))
        assert len(worker.saved) == 1


class Paged:
    """vLLM's attention layers, whose blocks are a dict."""

    def __init__(self, limit=10**6):
        self.slots = [{} for _ in range(LAYERS)]
        layers = {str(n): SimpleNamespace(impl=self, kv_cache=self.slots[n]) for n in range(LAYERS)}
        self.kv = TailedKV(layers, SIZE, torch.device("cpu"), limit)

    def do_kv_cache_update(self, module, k, v, cache, slots):
        cache.update(zip(slots.tolist(), torch.stack([k, v], 1).clone(), strict=True))

    def blend(self, plan, seed=0, keep=True):
        """Writes a plan's KV as a blend does: from what is held on, layer by layer."""
        end = plan.request.end
        generator = torch.Generator().manual_seed(seed)
        kv = torch.randn(LAYERS, 2, end, HEADS, DIM, generator=generator)
        where = self.kv.slots(plan.block_ids, plan.held, end)
        for layer in range(LAYERS):
            k, v = kv[layer]
            cache = SimpleNamespace(rows=lambda _, a, b, k=k, v=v: (k[a:b], v[a:b]))
            self.kv.write(layer, cache, plan.held, where)
        if keep:
            self.kv.keep(plan)
        return kv


class TestTails:
    def test_what_is_behind_the_last_full_block_is_written_again(self):
        paged = Paged()
        kv = paged.blend(plan(held=0))
        for slots in paged.slots:
            slots.clear()
        assert paged.kv.restore(plan("again", held=80))
        for layer, slots in enumerate(paged.slots):
            assert sorted(slots) == [105 * SIZE, 105 * SIZE + 1, 105 * SIZE + 2]
            for n, at in enumerate(sorted(slots)):
                assert torch.equal(slots[at], kv[layer][:, 80 + n])

    @pytest.mark.parametrize("other", [dict(held=64), dict(held=0), dict(held=80, salt="t")])
    def test_what_else_is_missing_is_not(self, other):
        paged = Paged()
        paged.blend(plan())
        assert not paged.kv.restore(plan(**other))

    def test_it_takes_no_more_than_its_limit(self):
        one = 3 * LAYERS * 2 * HEADS * DIM * 4
        paged = Paged(limit=2 * one)
        for salt in "abc":
            paged.blend(plan(salt=salt))
        assert [paged.kv.restore(plan(held=80, salt=salt)) for salt in "abc"] == [False, True, True]
        paged.kv.forget(plan(salt="b"))
        paged.blend(plan(salt="d"))
        assert paged.kv.restore(plan(held=80, salt="c"))
        assert not paged.kv.restore(plan(held=80, salt="b"))

    def test_a_runner_blends_once_for_all_of_one_kind(self):
        paged, worker = Paged(), Worker()
        runner = StepRunner(worker, SIZE, fails)
        runner.tails = paged.kv
        worker.trouble = lambda plan: paged.blend(plan, keep=False)
        done = runner.blend(StepPlan((plan("1"), plan("2", held=80), plan("3", held=80))))
        assert [s.outcome for s in done.summaries] == ["blended", "held", "held"]
        assert [s.held for s in done.summaries] == [0, 83, 83]
        assert len(worker.plans) == 1
