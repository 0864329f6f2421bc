"""vLLM as it runs: batches, chunked prefill, its prefix cache, preemption, aborts, failures."""

import logging
from contextlib import contextmanager

import pytest

from tests.vllm.worlds import extra_args, ids, make_text, sampling

STEPS = 4
SIZES = (61, 40, 77, 52)


@pytest.fixture(scope="module")
def served(start):
    """Prompts are longer than a batch, and one is as much as a step blends."""
    return start("llama", max_num_batched_tokens=48, extra={"step_tokens": 300})


_seeds = iter(range(1000, 10**6, 1000))


@pytest.fixture
def text():
    """A text that no other test has."""
    return make_text(SIZES, seed=next(_seeds))


def stored(served, text, order=(0, 1, 2, 3)):
    """Chunks as a prompt stored them that missed them; vLLM's own cache is empty after it."""
    for index in order:
        served.ask(text.prompt([index]))
    served.forget()


def report(answer):
    return answer.raw.kv_transfer_params["cacheblend"]


def statuses(answer):
    return [s["status"] for s in report(answer)["segments"] if s["kind"] == "chunk"]


def side(served):
    return served.scheduler.connector.scheduler


@contextmanager
def lines(caplog):
    """What the connector logs."""
    logger = logging.getLogger("vllm.cacheblend")
    logger.addHandler(caplog.handler)
    caplog.clear()
    said = []
    try:
        yield said
    finally:
        said += [r for r in caplog.records if r.name == "vllm.cacheblend"]
        logger.removeHandler(caplog.handler)


class Stepped:
    """Requests driven a step at a time. tokens: what each has got so far."""

    def __init__(self, served):
        self.served, self.engine = served, served.llm.llm_engine
        self.tokens, self.reports = {}, {}

    def add(self, name, prompt, steps=STEPS, **wishes):
        named = not isinstance(prompt, tuple)
        extra = extra_args(prompt, **wishes) if named else None
        given = {"prompt_token_ids": list(prompt.token_ids if named else prompt)}
        self.engine.add_request(name, given, sampling(steps, False, extra))

    def step(self):
        for output in self.engine.step():
            self.tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            if output.finished and output.kv_transfer_params:
                self.reports[output.request_id] = output.kv_transfer_params["cacheblend"]

    def run(self):
        steps = 0
        while self.engine.has_unfinished_requests():
            self.step()
            steps += 1
            assert steps < 2000
        self.served.settle()
        return self.tokens


class TestMixtures:
    @pytest.mark.parametrize("have", [(1,), (0, 3), (0, 1, 2, 3)])
    def test_any_mixture_of_hits_and_misses(self, served, text, have):
        stored(served, text, have)
        prompt = text.prompt([2, 0, 3, 1])
        chunks = [s for s in prompt.segments if s.kind == "chunk"]
        hits = [s for s, index in zip(chunks, [2, 0, 3, 1], strict=True) if index in have]
        everything = [p for s in hits for p in range(s.start, s.end)]
        full = served.ask(prompt.token_ids, steps=STEPS)
        blended = served.ask(prompt, steps=STEPS, policy="explicit", indices=everything)
        assert report(blended)["status"] == "blended"
        expected = ["hit" if index in have else "miss" for index in [2, 0, 3, 1]]
        assert [s.replace("exact", "hit") for s in statuses(blended)] == expected
        assert blended.token_ids == full.token_ids
        assert (blended.logprobs - full.logprobs).abs().max() < 1e-3
        served.forget()
        again = served.ask(prompt, steps=1, ratio=0.2)
        assert set(statuses(again)) <= {"hit", "exact"}, "what missed is stored now"

    def test_a_batch_gives_what_each_gives_alone(self, served, text):
        stored(served, text)
        orders = ([2, 0, 3, 1], [1, 3], [3, 2, 1], [0, 3, 1, 2])
        asked = [text.prompt(order) for order in orders]
        mixed = [*asked, *(prompt.token_ids for prompt in asked)]
        alone = []
        for prompt in mixed:
            alone.append(served.ask(prompt, steps=STEPS).token_ids)
            served.forget()
        together = served.batch(mixed, steps=STEPS)
        assert [answer.token_ids for answer in together] == alone
        assert [report(a)["status"] for a in together[:4]] == ["blended"] * 4
        assert all(a.raw.kv_transfer_params is None for a in together[4:])
        assert side(served).idle

    def test_a_suffix_longer_than_a_batch(self, served, text):
        stored(served, text)
        prompt = text.prompt([3, 1], suffix=ids(130, 5))
        full = served.ask(prompt.token_ids, steps=STEPS)
        chunks = [s for s in prompt.segments if s.kind == "chunk"]
        everything = [p for s in chunks for p in range(s.start, s.end)]
        blended = served.ask(prompt, steps=STEPS, policy="explicit", indices=everything)
        assert blended.token_ids == full.token_ids
        assert (blended.logprobs - full.logprobs).abs().max() < 1e-3

    def test_several_answers_to_one_prompt(self, served, text):
        from vllm import SamplingParams

        stored(served, text)
        prompt = text.prompt([2, 0, 1])
        params = SamplingParams(
            *(), n=3, temperature=1.0, seed=1, max_tokens=STEPS, ignore_eos=True, detokenize=False
        )
        params.extra_args = extra_args(prompt, ratio=0.3)
        given = {"prompt_token_ids": list(prompt.token_ids)}
        served.runs.clear()
        (output,) = served.llm.generate([given], params, use_tqdm=False)
        served.settle()
        assert [len(o.token_ids) for o in output.outputs] == [STEPS] * 3
        assert len(served.runs) == 1, "it is blended once for all of them"
        assert side(served).idle


class TestPrefixCache:
    def test_the_same_request_again_has_its_own_blocks(self, served, text):
        stored(served, text)
        prompt = text.prompt([2, 0, 3, 1])
        first = served.ask(prompt, steps=STEPS)
        served.runs.clear()
        again = served.ask(prompt, steps=STEPS)
        assert report(first)["held_tokens"] == 0
        assert report(again)["status"] == "held"
        assert not served.runs
        assert again.token_ids == first.token_ids
        assert (again.logprobs - first.logprobs).abs().max() < 1e-4

    def test_a_request_wholly_in_blocks_is_not_blended(self, served, text):
        stored(served, text)
        prompt = text.prompt([2, 0], suffix=ids(60, 8))
        first = served.ask(prompt, steps=STEPS)
        served.runs.clear()
        again = served.ask(prompt, steps=STEPS)
        assert report(again)["status"] == "held"
        assert not served.runs
        assert again.token_ids == first.token_ids

    def test_without_what_is_behind_the_last_block_it_is_blended_again(
        self, served, text, monkeypatch
    ):
        stored(served, text)
        prompt = text.prompt([2, 0, 3, 1])
        first = served.ask(prompt, steps=STEPS)
        monkeypatch.setattr(served.connector.steps, "tails", None)
        again = served.ask(prompt, steps=STEPS)
        assert report(again)["status"] == "blended"
        assert report(again)["held_tokens"] == 224  # full blocks of its 252 tokens
        assert again.token_ids == first.token_ids
        assert (again.logprobs - first.logprobs).abs().max() < 1e-4

    def test_blocks_that_are_gone_are_blended_again(self, served, text):
        stored(served, text)
        prompt = text.prompt([2, 0, 3, 1])
        first = served.ask(prompt, steps=STEPS)
        blocks = served.runs[-1].plan.block_ids
        served.scheduler.kv_cache_manager.evict_blocks(set(blocks[3:]))
        again = served.ask(prompt, steps=STEPS)
        assert report(again)["held_tokens"] == 96
        assert again.token_ids == first.token_ids
        assert (again.logprobs - first.logprobs).abs().max() < 1e-4

    def test_plain_requests_never_get_blended_blocks(self, served, text):
        stored(served, text)
        prompt = text.prompt([2, 0, 3, 1])
        before = served.ask(prompt.token_ids, steps=STEPS)
        served.forget()
        blended = served.ask(prompt, steps=STEPS, ratio=0)
        after = served.ask(prompt.token_ids, steps=STEPS)
        assert after.raw.num_cached_tokens == 0
        assert after.token_ids == before.token_ids
        assert (after.logprobs - before.logprobs).abs().max() < 1e-4
        assert (after.logprobs[0] - blended.logprobs[0]).abs().max() > 1e-3, "it tells nothing"
        again = served.ask(prompt, steps=STEPS, ratio=0)  # nor blended ones plain blocks
        assert again.token_ids == blended.token_ids
        assert (again.logprobs - blended.logprobs).abs().max() < 1e-4

    def test_requests_blended_otherwise_share_nothing(self, served, text):
        stored(served, text)
        prompt = text.prompt([2, 0, 3, 1])
        for wishes in (dict(ratio=0), dict(ratio=0.3), dict(policy="key"), dict(mode="reuse")):
            assert report(served.ask(prompt, **wishes))["held_tokens"] == 0

    def test_questions_share_blocks_where_the_policy_does_not_read_them(self, served, text):
        stored(served, text)
        first, other = (text.prompt([2, 0, 3], suffix=ids(7, seed)) for seed in (1, 2))
        for policy, shared in (("value", True), ("question", False)):
            served.forget()
            alone = served.ask(other, steps=STEPS, policy=policy)
            served.forget()
            served.ask(first, policy=policy)
            answer = served.ask(other, steps=STEPS, policy=policy)
            assert (report(answer)["held_tokens"] > 0) == shared
            assert answer.token_ids == alone.token_ids


class TestLeftToVllm:
    def test_log_probabilities_of_the_prompt(self, served, text):
        from vllm import SamplingParams

        stored(served, text)
        prompt = text.prompt([2, 0])
        given = {"prompt_token_ids": list(prompt.token_ids)}
        plain = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
        named = plain.clone()
        named.extra_args = extra_args(prompt, ratio=0)
        outputs = [served.llm.generate([given], p, use_tqdm=False)[0] for p in (plain, named)]
        values = [
            [max(step.values(), key=lambda x: x.logprob).logprob for step in o.prompt_logprobs[1:]]
            for o in outputs
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
        assert len(values[0]) == len(prompt.token_ids) - 1
        assert outputs[1].kv_transfer_params["cacheblend"]["status"] == "full"

    def test_a_prompt_that_missed_altogether_is_stored_afterwards(self, served, text):
        prompt = text.prompt([2, 0])
        first = served.ask(prompt, steps=STEPS)
        assert report(first)["status"] == "full"
        assert report(first)["saving"] == 2
        assert first.token_ids == served.ask(prompt.token_ids, steps=STEPS).token_ids
        served.forget()
        assert statuses(served.ask(prompt, ratio=0)) == ["exact", "hit"]

    def test_too_few_cached_tokens(self, served, text):
        stored(served, text, [0])
        answer = served.ask(text.prompt([1, 0]), min_tokens=62)
        assert report(answer)["status"] == "full"
        assert report(answer)["saving"] == 1

    @pytest.mark.parametrize(
        "own",
        [
            dict(policy="nonsense"),
            dict(ratio="lots"),
            dict(segments=[{"kind": "chunk", "tokens": 10**9}]),
            dict(segments="x"),
            "what",
        ],
    )
    def test_wrong_parameters(self, served, text, own, caplog):
        stored(served, text)
        prompt = text.prompt([2, 0])
        wishes = extra_args(prompt)
        if isinstance(own, dict):
            wishes["kv_transfer_params"]["cacheblend"].update(own)
        else:
            wishes["kv_transfer_params"]["cacheblend"] = own
        given = {"prompt_token_ids": list(prompt.token_ids)}
        with lines(caplog) as said:
            params = sampling(STEPS, False, wishes)
            (output,) = served.llm.generate([given], params, use_tqdm=False)
        assert output.kv_transfer_params is None
        assert len(said) == 1
        plain = served.ask(prompt.token_ids, steps=STEPS)
        assert tuple(output.outputs[0].token_ids) == plain.token_ids

    def test_a_prompt_longer_than_the_model_takes(self, served, text):
        from vllm.exceptions import VLLMValidationError

        with pytest.raises(VLLMValidationError, match="1024"):
            served.ask(text.prompt([0, 1], suffix=ids(1000, 4)))
        assert side(served).idle
        served.ask(text.prompt([0, 1]))

    def test_switched_off_everything_is_plain(self, served, text, monkeypatch):
        stored(served, text)
        prompt = text.prompt([2, 0])
        plain = served.ask(prompt.token_ids, steps=STEPS)
        monkeypatch.setattr(served.scheduler.connector, "off", "a test says so")
        answer = served.ask(prompt, steps=STEPS)
        assert answer.raw.kv_transfer_params is None
        assert answer.token_ids == plain.token_ids


class TestTroubles:
    def test_a_blend_that_fails_is_computed(self, served, text, monkeypatch, caplog):
        stored(served, text)
        prompt = text.prompt([2, 0, 3])
        plain = served.ask(prompt.token_ids, steps=STEPS)
        worker = served.connector.steps.worker
        blend = worker.blend

        def failing(plan):
            if any(source.match for source in plan.sources):
                raise RuntimeError("no\nluck")
            return blend(plan)

        monkeypatch.setattr(worker, "blend", failing)
        with lines(caplog) as said:
            answer = served.ask(prompt, steps=STEPS)
        assert answer.token_ids == plain.token_ids
        assert (answer.logprobs - plain.logprobs).abs().max() < 1e-3
        assert report(answer)["status"] == "failed"
        assert report(answer)["why"] == "RuntimeError: no luck"
        assert len(said) == 1
        assert said[0].exc_info is None

    def test_where_nothing_can_be_blended_vllm_computes(self, served, text, monkeypatch):
        stored(served, text)
        prompt = text.prompt([2, 0, 3])
        plain = served.ask(prompt.token_ids, steps=STEPS)

        def failing(plan):
            raise RuntimeError("none at all")

        monkeypatch.setattr(served.connector.steps.worker, "blend", failing)
        answers = served.batch([prompt, prompt.token_ids, prompt], steps=STEPS)
        assert {answer.token_ids for answer in answers} == {plain.token_ids}
        assert report(answers[0])["status"] == "failed"
        monkeypatch.undo()
        assert side(served).idle
        served.forget()
        assert report(served.ask(prompt))["status"] == "blended"

    def test_a_store_that_takes_nothing(self, served, text, monkeypatch, caplog):
        def full(plan):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(served.connector.steps.worker, "save", full)
        with lines(caplog) as said:
            first = served.ask(text.prompt([2, 0]), steps=STEPS)
            served.ask(text.prompt([1, 3]))
        assert first.token_ids == served.ask(text.prompt([2, 0]).token_ids, steps=STEPS).token_ids
        assert len(said) == 1
        assert "No space left" in said[0].getMessage()
        served.connector.steps._resting_until = 0.0

    def test_a_store_that_cannot_be_asked(self, served, text, monkeypatch):
        stored(served, text)
        prompt = text.prompt([2, 0])

        def broken(*args, **kwargs):
            raise OSError("the disk is gone")

        monkeypatch.setattr(side(served).store, "find", broken)
        answer = served.ask(prompt, steps=STEPS)
        assert answer.token_ids == served.ask(prompt.token_ids, steps=STEPS).token_ids
        assert "the disk is gone" in report(answer)["why"]

    def test_an_entry_that_is_evicted_before_it_is_read(self, served, text, monkeypatch):
        stored(served, text)
        prompt = text.prompt([2, 0, 3])
        store, worker = served.connector.store, served.connector.steps.worker
        blend = worker.blend

        def late(plan):
            monkeypatch.undo()
            store.discard(plan.sources[3].match.key)
            return blend(plan)

        monkeypatch.setattr(worker, "blend", late)
        answer = served.ask(prompt, steps=STEPS)
        assert statuses(answer).count("miss") == 1
        served.forget()
        assert "miss" not in statuses(served.ask(prompt)), "it is stored again"


class TestSteps:
    def test_no_step_blends_more_than_its_budget_and_decoding_goes_on(self, served, text):
        stored(served, text)
        asked = [text.prompt(order) for order in ([2, 0, 3], [3, 1, 2], [1, 0, 2, 3], [0, 3, 2])]
        alone = [served.ask(prompt, steps=STEPS).token_ids for prompt in asked]
        served.forget()
        stepped = Stepped(served)
        stepped.add("plain", ids(20, 3), steps=60)
        stepped.step()
        for number, prompt in enumerate(asked):
            stepped.add(str(number), prompt)
        runs = served.runs
        runs.clear()
        while len(stepped.reports) < len(asked):
            before, got = len(runs), len(stepped.tokens["plain"])
            stepped.step()
            assert len(runs) - before <= 1, "two prompts are more than the budget"
            assert len(stepped.tokens["plain"]) == got + 1, "the other request goes on"
        stepped.run()
        assert [stepped.tokens[str(number)] for number in range(4)] == alone
        assert len(stepped.tokens["plain"]) == 60

    def test_requests_may_be_aborted_at_any_time(self, served, text):
        stored(served, text)
        prompts = [text.prompt(order) for order in ([2, 0, 3], [3, 1, 2], [1, 0, 2])]
        alone = served.ask(prompts[2], steps=STEPS).token_ids
        served.forget()
        stepped = Stepped(served)
        for number, prompt in enumerate(prompts):
            stepped.add(str(number), prompt, steps=40 if number < 2 else STEPS)
        stepped.step()  # the first runs, the others wait for the next steps
        assert len(served.scheduler.waiting) >= 1
        stepped.engine.abort_request(["0", "1"])
        tokens = stepped.run()
        assert tokens["2"] == alone
        assert side(served).idle

    def test_a_request_aborted_before_it_ran(self, served, text):
        stepped = Stepped(served)
        stepped.add("0", text.prompt([0, 1]))
        stepped.engine.abort_request(["0"])
        stepped.run()
        assert side(served).idle
        assert not side(served).has_work


class TestPreemption:
    @pytest.fixture(scope="class")
    def narrow(self, start):
        return start("llama", num_gpu_blocks_override=22, max_model_len=512)

    def test_preempted_requests_go_on_as_they_began(self, narrow, text, monkeypatch):
        stored(narrow, text)
        asked = [text.prompt(order) for order in ([2, 0, 3], [3, 2, 1], [1, 0, 2])]
        steps = 70
        alone = []
        for prompt in asked:
            alone.append(narrow.ask(prompt, steps=steps, logprobs=False).token_ids)
            narrow.forget()
        preempted = []
        preempt = narrow.scheduler._preempt_request

        def counted(request, *args, **kwargs):
            preempted.append((request.request_id, len(request.output_token_ids)))
            return preempt(request, *args, **kwargs)

        monkeypatch.setattr(narrow.scheduler, "_preempt_request", counted)
        together = narrow.batch(asked, steps=steps, logprobs=False)
        assert any(tokens > 0 for _, tokens in preempted), "nothing was preempted in its answer"
        assert [answer.token_ids for answer in together] == alone
        assert side(narrow).idle
