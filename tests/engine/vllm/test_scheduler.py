"""The scheduler's side of the connector, with requests and a store that are names only."""

import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from cache_store.store import ChunkStore
from engine.options import BlendOptions
from engine.vllm.salt import Salt
from engine.vllm.saves import BUSY_STEPS
from engine.vllm.scheduler import PATIENCE
from engine.vllm.settings import ConnectorSettings, open_store
from tests.engine.vllm.streams import (
    SPEC,
    FakeRequest,
    Names,
    chunk,
    request,
    result,
    scheduler,
)

A, B, C = chunk(1), chunk(2), chunk(3)


def run(side, asked, held=0):
    """As vLLM schedules a request: what is claimed, and the step's plan."""
    claim = side.matched(asked, held)
    assert claim is not None
    side.allocated(asked, list(range(20)), claim)
    return claim, side.step(busy=True)


def test_a_request_is_blended_up_to_its_last_chunks_end():
    side = scheduler(Names([A, C]))
    asked = request("r", [A, B, C])
    side.arrived(asked)
    claim, plan = run(side, asked)
    (blend,) = plan.blends
    assert claim == blend.request.end == 3 + 120
    assert blend.held == 0
    assert blend.block_ids == tuple(range(20))
    assert [s.status for s in blend.sources][1:4] == ["hit", "miss", "hit"]
    assert side.step(busy=True).blends == ()


def test_what_is_in_blocks_already_is_not_claimed_again():
    side = scheduler(Names([A, B]))
    asked = request("r", [A, B])
    side.arrived(asked)
    claim, plan = run(side, asked, held=64)
    assert claim == 83 - 64
    assert plan.blends[0].held == 64
    assert run(side, asked, held=96)[1].blends == ()
    told = side.finished(asked)["cacheblend"]
    assert told == {}  # its first blend's result is to come
    side.results([result(plan.blends[0])])
    assert told["status"] == "blended"
    assert side.idle


def test_a_plain_request_is_left_alone():
    side = scheduler(Names([A]))
    plain = FakeRequest("p", list(range(100)), cache_salt="mine")
    before = list(plain.block_hashes)
    assert side.arrived(plain) is None
    assert side.matched(plain, 0) == 0
    assert plain.cache_salt == "mine"
    assert plain.block_hashes == before
    assert side.finished(plain) is None
    assert side.idle
    assert not side.warnings


@pytest.mark.parametrize(
    "own",
    [
        dict(policy="nonsense"),
        dict(ratio="2"),
        dict(ratio=[]),
        dict(mode=7),
        dict(check_layers=99),
        dict(check_layers="x"),
        dict(indices="abc"),
        dict(question_tokens=-1),
        dict(question_tokens="all"),
        dict(min_tokens="many"),
        dict(segments=7),
        dict(segments=[{"kind": "chunk"}]),
        dict(segments=[{"kind": "chunk", "tokens": 10_000}]),
        dict(segments=["chunk"]),
        "a text",
        [1, 2],
    ],
)
def test_wrong_parameters_leave_a_request_plain_with_one_line(own):
    side = scheduler(Names([A]))
    asked = request("r\n\x1b[31m", [A, B])
    if isinstance(own, dict):
        asked.kv_transfer_params["cacheblend"].update(own)
    else:
        asked.kv_transfer_params["cacheblend"] = own
    before = list(asked.block_hashes)
    assert side.arrived(asked) is None
    assert asked.cache_salt is None
    assert asked.block_hashes == before
    (line,) = side.warnings
    assert "\n" not in line
    assert "\x1b" not in line
    assert side.matched(asked, 0) == 0
    assert side.finished(asked) is None


@pytest.mark.parametrize(
    "what",
    [
        dict(lora_request=object()),
        dict(mm_features=[object()]),
        dict(prompt_embeds=object()),
        dict(resumable=True),
        dict(prompt_token_ids=None),
    ],
)
def test_other_kinds_of_requests_are_left_to_vllm(what):
    side = scheduler(Names([A]))
    asked = request("r", [A, B])
    for name, value in what.items():
        setattr(asked, name, value)
    assert side.arrived(asked) is None
    assert asked.cache_salt is None
    assert side.matched(asked, 0) == 0
    assert side.finished(asked) is None


class TestSalt:
    def salts(self, *requests, **settings):
        side = scheduler(Names([A, B, C]), **settings)
        for asked in requests:
            assert side.arrived(asked) is not None
        return [asked.cache_salt for asked in requests]

    def test_the_same_request_has_the_same_salt(self):
        first, again = self.salts(request("1", [A, B]), request("2", [A, B]))
        assert first == again

    @pytest.mark.parametrize(
        "wishes",
        [
            dict(ratio=0.17),
            dict(policy="key"),
            dict(check_layers=2),
            dict(mode="reuse"),
            dict(threshold=0.5),
            dict(min_tokens=3),
            dict(policy="explicit", indices=[5]),
        ],
    )
    def test_whatever_changes_the_kv_changes_the_salt(self, wishes):
        first, other = self.salts(request("1", [A, B]), request("2", [A, B], **wishes))
        assert first != other

    @pytest.mark.parametrize(
        "other", [dict(transfer=True), dict(strict_context=True), dict(policy="random", seed=1)]
    )
    def test_so_do_options_that_only_the_engine_is_given(self, other):
        plan = scheduler(Names([A])).arrived(request("1", [A, B]))
        salt = Salt(4, "store")
        changed = replace(plan, options=BlendOptions.of(**{"policy": "value"} | other))
        plain = replace(plan, options=BlendOptions.of(policy="value"))
        assert salt(plain, None) != salt(changed, None) != Salt(4, "other")(changed, None)

    def test_later_chunks_count_for_they_take_part_in_the_selection(self):
        first, other = self.salts(request("1", [A, B]), request("2", [A, C]))
        assert first != other

    def test_bounds_count(self):
        whole = [*A, *B]
        first, other = self.salts(request("1", [A, B]), request("2", [whole[:41], whole[41:]]))
        assert first != other

    def test_the_users_own_salt_keeps_its_meaning(self):
        salts = self.salts(
            *(request(str(n), [A], salt=salt) for n, salt in enumerate((None, "", "a", "b")))
        )
        assert len(set(salts)) == 4

    def test_another_engine_has_other_salts(self):
        (first,), (other,) = self.salts(request("1", [A])), self.salts(request("1", [A]))
        assert first != other

    @pytest.mark.parametrize(
        ("policy", "reads"),
        [("value", False), ("key", False), ("first-k:k=3", False), ("question", True)],
    )
    def test_the_question_counts_where_it_is_read(self, policy, reads):
        asked = [request(str(n), [A, B], question=(n, 9), policy=policy) for n in range(2)]
        first, other = self.salts(*asked)
        assert (first != other) == reads

    def test_only_what_is_read_of_the_question_counts(self):
        asked = [
            request(str(n), [A, B], question=(5, n), policy="question", question_tokens=1)
            for n in range(2)
        ]
        first, other = self.salts(*asked)
        assert first == other

    def test_reuse_never_reads_the_question(self):
        asked = [
            request(str(n), [A, B], question=(n,), policy="question", mode="reuse")
            for n in range(2)
        ]
        first, other = self.salts(*asked)
        assert first == other

    def test_what_is_computed_in_full_shares_blocks_with_plain_requests(self):
        assert self.salts(request("1", [A, B], ratio=1, salt="own")) == ["own"]

    def test_hashes_are_of_the_new_salt(self):
        asked = request("1", [A, B])
        plain = list(asked.block_hashes)
        self.salts(asked)
        assert len(asked.block_hashes) == len(plain)
        assert not set(asked.block_hashes) & set(plain)


class TestBudget:
    def test_a_step_has_no_more_than_its_budget(self):
        side = scheduler(Names([A, B]), step_tokens=200)
        asked = [request(str(n), [A, B]) for n in range(3)]  # 83 tokens each
        for one in asked:
            side.arrived(one)
        assert [side.matched(one, 0) for one in asked[:1]] == [83]
        side.allocated(asked[0], range(9), 83)
        assert side.matched(asked[1], 0) == 83
        side.allocated(asked[1], range(9), 83)
        assert side.matched(asked[2], 0) is None
        assert len(side.step(busy=True).blends) == 2
        assert side.matched(asked[2], 0) == 83

    def test_one_alone_may_be_longer_than_the_budget(self):
        side = scheduler(Names([A, B]), step_tokens=50)
        asked = request("r", [A, B])
        side.arrived(asked)
        assert side.matched(asked, 0) == 83

    def test_a_request_that_got_no_room_takes_none_of_the_budget(self):
        side = scheduler(Names([A, B]), step_tokens=100)
        first, second = request("1", [A, B]), request("2", [A, B])
        side.arrived(first), side.arrived(second)
        assert side.matched(first, 0) == 83  # and is not allocated
        assert side.matched(second, 0) == 83

    def test_more_missed_tokens_than_a_step_computes_are_vllms(self):
        side = scheduler(Names([A]), step_tokens=60)
        asked = request("r", [A, B, C])
        side.arrived(asked)
        assert run(side, asked)[0] == 0
        assert "80 tokens of missed chunks" in side.finished(asked)["cacheblend"]["why"]
        assert len(side.saves) == 2


class TestLookups:
    def test_a_waiting_request_is_looked_up_again_only_after_a_while(self):
        now = [0.0]
        store = Names([A])
        side = scheduler(store, clock=lambda: now[0])
        asked = request("r", [A, B])
        side.arrived(asked)
        side.matched(asked, 0)
        finds = store.finds
        side.matched(asked, 0)
        assert store.finds == finds
        store.stored.add(B)
        now[0] = 5.0
        _claim, plan = run(side, asked)
        assert [s.status for s in plan.blends[0].sources][1:3] == ["hit", "hit"]

    def test_a_resumed_request_is_looked_up_anew(self):
        store = Names([A, B])
        side = scheduler(store)
        asked = request("r", [A, B])
        side.arrived(asked)
        run(side, asked)
        store.stored.discard(B)
        _, plan = run(side, asked)
        assert [s.status for s in plan.blends[0].sources][1:3] == ["hit", "miss"]

    @pytest.mark.parametrize("error", [OSError("disk"), ValueError("odd"), MemoryError()])
    def test_a_store_in_trouble_leaves_requests_to_vllm(self, error):
        store = Names([A, B])
        side = scheduler(store)
        store.broken = error
        asked = request("r", [A, B])
        side.arrived(asked)
        assert run(side, asked)[0] == 0
        assert side.finished(asked)["cacheblend"]["status"] == "full"
        assert side.warnings
        assert side.idle

    def test_what_the_store_has_to_say_is_told_once(self):
        store = Names([A, B])
        store.damaged = ["before"]
        side = scheduler(store)
        store.damaged.append("entry 1 is damaged")
        store.notes.append("the remote is slow")
        side.step(busy=False)
        assert side.warnings == ["entry 1 is damaged", "the remote is slow"]
        side.step(busy=False)
        assert len(side.warnings) == 2

    def test_trouble_with_the_audits_log_is_a_warning(self, monkeypatch):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)

        def offer(*given):
            raise OSError("no such disk")

        monkeypatch.setattr(side.audits, "offer", offer)
        side.results([result(plan.blends[0])])
        assert side.finished(asked)["cacheblend"]["status"] == "blended"
        assert "no such disk" in side.warnings[0]

    @pytest.mark.parametrize(
        ("stored", "wishes", "why"),
        [
            ((), {}, "nothing of it is stored"),
            ((A,), dict(min_tokens=41), "blending begins at 41"),
            ((A,), dict(policy="explicit", indices=[50]), "not a cached token"),
            ((A, B), dict(ratio=1), "all of it"),
        ],
    )
    def test_where_blending_is_not_worth_it_vllm_computes(self, stored, wishes, why):
        side = scheduler(Names(stored))
        asked = request("r", [A, B], **wishes)
        side.arrived(asked)
        assert run(side, asked)[0] == 0
        told = side.finished(asked)["cacheblend"]
        assert told["status"] == "full"
        assert why in told["why"]
        assert len(side.saves) == told["saving"] == 2 - len(stored)

    def test_log_probabilities_of_the_prompt_are_vllms(self):
        side = scheduler(Names([A]))
        asked = request("r", [A, B])
        asked.skip_reading_prefix_cache = True
        side.arrived(asked)
        assert asked.cache_salt is None
        assert run(side, asked)[0] == 0
        told = side.finished(asked)["cacheblend"]
        assert told["status"] == "full"
        assert told["saving"] == 1


class TestRemote:
    """Where a network may have to be waited for, a thread does it."""

    @pytest.fixture
    def slow(self):
        """A store that answers once it may; and the side that asks it, whose clock is `now`."""
        store, self.may, self.now = Names([A, B]), threading.Event(), [0.0]
        find = store.find
        store.find = lambda *args, **named: self.may.wait(30) and find(*args, **named)
        side = scheduler(store, remote="file:///nowhere", clock=lambda: self.now[0])
        yield store, side
        self.may.set()
        side.close()

    def until_known(self, side, asked):
        end = time.monotonic() + 30
        while (claim := side.matched(asked, 0)) is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        return claim

    def test_a_request_waits_and_the_others_go_on(self, slow):
        store, side = slow
        asked, plain = request("r", [A, B]), FakeRequest("p", list(range(100)))
        side.arrived(asked)
        side.arrived(plain)
        assert side.matched(asked, 0) is None
        assert side.matched(plain, 0) == 0
        self.may.set()
        assert self.until_known(side, asked) == 83
        finds = store.finds
        side.matched(asked, 0)
        assert store.finds == finds

    def test_a_store_that_does_not_answer_leaves_it_to_vllm(self, slow):
        _, side = slow
        asked = request("r", [A, B])
        side.arrived(asked)
        assert side.matched(asked, 0) is None
        self.now[0] = PATIENCE + 1
        assert run(side, asked)[0] == 0
        assert "in time" in side.finished(asked)["cacheblend"]["why"]
        assert side.idle

    def test_a_request_that_ends_while_it_is_looked_up(self, slow):
        _, side = slow
        for name in "abc":
            asked = request(name, [A, B])
            side.arrived(asked)
            side.finished(asked)
        assert side.idle

    def test_an_error_of_the_store_is_one_of_the_thread_too(self, slow):
        store, side = slow
        store.broken = OSError("no network")
        asked = request("r", [A, B])
        side.arrived(asked)
        self.may.set()
        assert self.until_known(side, asked) == 0
        assert "no network" in side.warnings[0]

    def test_a_prompt_that_is_here_waits_for_nobody_elses(self, slow):
        store, side = slow
        asked = request("far", [A, B])
        side.arrived(asked)
        assert side.matched(asked, 0) is None
        store.here = {(1, 2, 3), A, B}
        near = request("near", [B, A])
        side.arrived(near)
        assert side.matched(near, 0) == 83
        assert side.matched(asked, 0) is None

    def test_a_thread_that_cannot_be_had_is_an_error_of_the_store(self, slow):
        _, side = slow
        side.close()
        asked = request("r", [A, B])
        side.arrived(asked)
        assert self.until_known(side, asked) == 0
        assert "could not be asked" in side.finished(asked)["cacheblend"]["why"]
        assert side.idle

    def test_what_only_the_remote_has_is_on_the_disk_before_it_is_blended(self, tmp_path):
        (tmp_path / "remote").mkdir()
        remote = f"file://{tmp_path}/remote"
        kv = bytes(40 * SPEC.kv_heads * SPEC.head_dim * 4)
        given = {"store": str(tmp_path / "first"), "remote": remote, "limit": "100MB"}
        with closing(open_store(ConnectorSettings.of(given))) as first:
            first.put(SPEC, A, (1, 2, 3), "", [(kv, kv)] * SPEC.layers, chunk_id="a" * 64)
        path = tmp_path / "second"
        with closing(open_store(ConnectorSettings.of(given | {"store": str(path)}))) as second:
            side = scheduler(second, remote=remote)
            asked = request("r", [A, B])
            side.arrived(asked)
            assert self.until_known(side, asked) == 83
            with closing(ChunkStore.open(path, read_only=True)) as worker:
                assert worker.contains(SPEC, A, (1, 2, 3))
            side.close()

    def test_a_real_store_may_be_asked_by_a_thread(self, tmp_path):
        store = ChunkStore.open(tmp_path / "store", limit_bytes=10**8)
        kv = bytes(40 * SPEC.kv_heads * SPEC.head_dim * 4)
        store.put(SPEC, A, (1, 2, 3), "", [(kv, kv)] * SPEC.layers)
        side = scheduler(store, remote="file:///nowhere")
        asked = request("r", [A, B])
        side.arrived(asked)
        assert self.until_known(side, asked) == 83
        _, plan = run(side, asked)
        assert [s.status for s in plan.blends[0].sources][1:3] == ["exact", "miss"]
        side.results([result(plan.blends[0])])
        told = side.finished(asked)["cacheblend"]
        assert [s["reason"] for s in told["segments"]][1:3] == [None, "absent"]
        assert not side.warnings
        side.close()
        store.close()


class TestSaves:
    def missed(self, side, *asked):
        for one in asked:
            side.arrived(one)
            run(side, one)
            side.finished(one)

    def drained(self, side, busy=False, steps=1000):
        saved = []
        for _ in range(steps):
            saved += [ids for plan in side.step(busy=busy).saves for ids, _ in plan.chunks]
        return saved

    def test_one_chunk_an_idle_step(self):
        side = scheduler(Names())
        self.missed(side, request("r", [A, B, C]))
        assert side.has_work
        plans = [side.step(busy=False).saves for _ in range(3)]
        assert [[ids for ids, _ in plan[0].chunks] for plan in plans] == [[A], [B], [C]]
        assert not side.has_work
        assert side.step(busy=False).saves == ()

    def test_now_and_then_a_chunk_while_requests_run(self):
        side = scheduler(Names())
        self.missed(side, request("r", [A, B]))
        assert self.drained(side, busy=True, steps=BUSY_STEPS - 1) == []
        assert self.drained(side, busy=True, steps=2 * BUSY_STEPS) == [A, B]

    def test_all_at_once_where_the_engine_makes_no_idle_steps(self):
        side = scheduler(Names(), idles=False)
        self.missed(side, request("r", [A, B]))
        assert self.drained(side, busy=True, steps=1) == [A, B]

    def test_what_several_missed_is_saved_once(self):
        side = scheduler(Names())
        self.missed(side, request("1", [A, B]), request("2", [B, A, C]))
        assert self.drained(side) == [A, B, C]

    def test_behind_another_prefix_it_is_another_chunk(self):
        side = scheduler(Names())
        self.missed(side, request("1", [A]), request("2", [A], prefix=(4, 5)))
        assert self.drained(side) == [A, A]

    @pytest.mark.parametrize(
        ("store", "wishes"), [(Names(read_only=True), {}), (Names(), dict(save=False))]
    )
    def test_nothing_is_saved_where_it_is_not_wanted(self, store, wishes):
        side = scheduler(store)
        self.missed(side, request("r", [A, B], **wishes))
        assert not side.has_work

    def test_a_request_that_never_ran_leaves_nothing(self):
        store = Names()
        side = scheduler(store)
        asked = request("r", [A, B])
        side.arrived(asked)
        side.matched(asked, 0)
        asked.status.name = "FINISHED_ABORTED"
        assert side.finished(asked)["cacheblend"]["saving"] == 0
        assert not side.has_work
        assert side.idle
        assert not store.counted

    def test_an_entry_that_was_lost_meanwhile_is_stored_again(self):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)
        blend = plan.blends[0]
        lost = [s if n != 2 else type(s)(s.segment, "miss") for n, s in enumerate(blend.sources)]
        side.results([result(type(blend)(blend.request, tuple(lost), blend.block_ids, 0))])
        side.finished(asked)
        assert self.drained(side) == [B]


class TestReports:
    def test_a_result_that_comes_after_the_end_is_filled_in(self):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)
        told = side.finished(asked)
        assert told == {"cacheblend": {}}
        side.results([result(plan.blends[0], recomputed=8, per_layer=(80, 8))])
        said = told["cacheblend"]
        assert said["status"] == "blended"
        assert said["recomputed"]["tokens"] == 8
        assert said["chunk_tokens"] == {"cached": 80, "exact": 0, "hit": 80, "miss": 0}
        assert [s.request_id for s in side.take_summaries()] == ["r"]
        assert side.take_summaries() == []
        assert side.idle

    def test_a_request_wholly_in_blocks(self):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        assert run(side, asked, held=96)[0] == 0
        told = side.finished(asked)["cacheblend"]
        assert told["status"] == "held"
        assert told["held_tokens"] == 96

    def test_a_blend_that_failed(self):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)
        side.results([result(plan.blends[0], outcome="failed", why="boom")])
        told = side.finished(asked)["cacheblend"]
        assert told["status"] == "failed"
        assert told["why"] == "boom"

    def test_results_of_unknown_requests_are_nothing(self):
        side = scheduler(Names([A, B]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)
        side.finished(asked)
        side.results([result(plan.blends[0])])
        side.results([result(plan.blends[0])])
        assert side.idle

    def test_misses_say_why(self):
        side = scheduler(Names([A]))
        asked = request("r", [A, B])
        side.arrived(asked)
        _, plan = run(side, asked)
        side.results([result(plan.blends[0])])
        told = side.finished(asked)["cacheblend"]
        assert [s["reason"] for s in told["segments"] if s["status"] == "miss"] == ["absent"]
        assert side.store.counted == ["hit.other_context", "miss.absent"]
