"""Random streams of requests through the scheduler's side, as vLLM's own scheduler drives it."""

import os
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.vllm.saves import BUSY_STEPS
from tests.engine.vllm.streams import BLOCK, FakeRequest, Names, chunk, request, result, scheduler

STRESS = int(os.environ.get("CACHEBLEND_STRESS", "1"))
CHUNKS = [chunk(number, 17 + 9 * number) for number in range(1, 8)]
BUDGET = 300


class Engine:
    """What vLLM's scheduler does with its requests, at random: it admits in order, finds leading
    blocks in its cache or not, has no room, preempts, aborts, and hears of results steps later."""

    def __init__(self, store, rng, *, lag):
        self.side = scheduler(store, step_tokens=BUDGET)
        self.store, self.rng, self.lag = store, rng, lag
        self.waiting, self.running, self.told = deque(), [], []
        self.results = deque()
        self.saved = []

    def add(self, asked):
        self.side.arrived(asked)
        self.waiting.append(asked)

    def step(self):
        rng, side = self.rng, self.side
        for asked in [r for r in self.running if rng.random() < 0.1]:  # preempted
            self.running.remove(asked)
            self.waiting.appendleft(asked)
        claims, skipped, cost = {}, deque(), 0
        while self.waiting and rng.random() < 0.9:
            asked = self.waiting.popleft()
            whole = len(asked.prompt_token_ids)
            held = rng.choice([0, 0, (whole - 1) // BLOCK]) and rng.randrange(0, whole, BLOCK)
            claim = side.matched(asked, held)
            if claim is None:
                assert claims, "a request waits for blends that there are none of"
                skipped.append(asked)
                continue
            assert 0 <= held + claim < whole, "at least one token is vLLM's own"
            if rng.random() < 0.2:  # no room
                self.waiting.appendleft(asked)
                break
            side.allocated(asked, range(-(-whole // BLOCK)), claim)
            if claim:
                claims[asked.request_id] = held, claim
                cost += held + claim
            self.running.append(asked)
        self.waiting.extendleft(reversed(skipped))
        assert cost <= BUDGET or len(claims) == 1
        plan = side.step(busy=bool(self.running))
        planned = {b.request.request_id: (b.held, b.request.end - b.held) for b in plan.blends}
        assert planned == claims
        assert len(plan.blends) == len(claims)
        assert len(plan.saves) <= 1
        self.saved += [ids for save in plan.saves for ids, _ in save.chunks]
        self.store.stored |= set(self.saved)
        for blend in plan.blends:
            assert len(blend.block_ids) * BLOCK >= blend.request.end
        self.results.append([result(blend) for blend in plan.blends])
        for asked in [r for r in self.running if rng.random() < 0.3]:
            self.end(asked, self.running, "FINISHED_STOPPED")
        for asked in [r for r in self.waiting if rng.random() < 0.03]:
            self.end(asked, self.waiting, "FINISHED_ABORTED")
        while len(self.results) > self.lag:
            side.results(self.results.popleft())

    def end(self, asked, queue, why):
        queue.remove(asked)
        asked.status.name = why
        self.told.append((asked, self.side.finished(asked)))

    def drain(self):
        for _ in range(2000):
            if not (self.waiting or self.running or self.side.has_work):
                while self.results:
                    self.side.results(self.results.popleft())
                return
            self.step()
        raise AssertionError("it doesn't end")


def some_request(name, rng):
    kind = rng.random()
    if kind < 0.2:
        return FakeRequest(name, [rng.randrange(50) for _ in range(rng.randrange(1, 90))])
    wishes = rng.choice([{}, {}, dict(ratio=1), dict(mode="reuse"), dict(save=False)])
    if kind < 0.3:
        wishes = rng.choice([dict(policy="no"), dict(ratio="x"), dict(min_tokens=-1)])
    chosen = rng.choices(CHUNKS, k=rng.randrange(1, 6))
    return request(name, chosen, question=[5] * rng.randrange(1, 40), **wishes)


@settings(max_examples=60 * STRESS, deadline=None)
@given(seed=st.integers(0, 2**32), lag=st.integers(0, 3))
def test_any_stream_of_requests_ends_with_nothing_left_behind(seed, lag):
    rng = random.Random(seed)
    store = Names(rng.sample(CHUNKS, rng.randrange(len(CHUNKS))))
    before = set(store.stored)
    engine = Engine(store, rng, lag=lag)
    asked = [some_request(str(number), rng) for number in range(rng.randrange(1, 40))]
    for one in asked:
        engine.add(one)
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.drain()
    assert engine.side.idle
    assert len(engine.told) == len(asked)
    for _, told in engine.told:
        assert told is None or told["cacheblend"]["status"] in ("blended", "held", "full")
    assert not set(engine.saved) & before
    assert len(engine.side.take_summaries()) == sum(told is not None for _, told in engine.told)


def test_saves_go_on_in_an_engine_that_is_never_idle():
    side = scheduler(Names())
    saved, number = 0, 0
    while saved < len(CHUNKS):
        number += 1
        assert number < 2 * BUSY_STEPS * len(CHUNKS)
        asked = request(str(number), CHUNKS)
        side.arrived(asked)
        side.allocated(asked, range(40), side.matched(asked, 0))
        for save in side.step(busy=True).saves:
            side.store.stored |= {ids for ids, _ in save.chunks}
            saved += len(save.chunks)
        side.finished(asked)
