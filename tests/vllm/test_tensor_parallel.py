"""Tensor parallel on a real vLLM: ranks read their heads of one entry, and do the same."""

import time

import pytest
import torch

from cache_store.keys import KVSpec
from cache_store.store import ChunkStore
from engine.blueprint import Blueprint
from engine.compare import divergence
from engine.model import Decoder
from engine.options import BlendOptions
from engine.precompute import ChunkWriter
from engine.prefill import Prefiller
from tests.vllm import rank_probes as probes
from tests.vllm.worlds import Served, make_text

ORDER = (2, 0, 3, 1)


@pytest.fixture(scope="module")
def model(tiny_dir):
    return tiny_dir("llama-6kv")


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("store") / "store"


@pytest.fixture(scope="module", params=[2, 3])
def served(request, start, model, store_dir):
    """Three ranks have the store that two have filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of each rank
        patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        options = dict(tensor_parallel_size=request.param, extra={"self_test": True})
        running = start(model, store_dir, **options)
        running.llm.collective_rpc(probes.watch)
        yield running


@pytest.fixture(scope="module")
def torch_engine(model):
    return Decoder.load(model, "cpu", "fp32")


@pytest.fixture(scope="module")
def spec(model):
    return Blueprint.open(model, device="cpu", dtype="fp32").spec


def statuses(answer):
    report = answer.raw.kv_transfer_params["cacheblend"]
    return [s["status"] for s in report["segments"] if s["kind"] == "chunk"]


def blended(served: Served, prompt, **wishes):
    """The answer, and each rank's account of the blend."""
    served.forget()
    answer = served.ask(prompt, **wishes)
    return answer, served.llm.collective_rpc(probes.last_run)


def by_torch(decoder: Decoder, spec: KVSpec, store_dir, prompt, **options):
    store = ChunkStore.open(store_dir)
    try:
        chosen = BlendOptions.of(**{"min_tokens": 0, **options})
        return Prefiller(decoder, store, spec)(prompt, chosen, room=1)
    finally:
        store.close()


def test_missed_chunks_are_saved_once_and_whole(served, spec, store_dir, torch_engine, tmp_path):
    """By two ranks; for three they are hits."""
    text = make_text(seed=50)
    store = ChunkStore.open(store_dir)
    there = store.contains(spec, text.chunks[0].token_ids, text.prefix)
    first = served.ask(text.prompt([0, 1, 2, 3]))
    assert statuses(first) == (["exact", "hit", "hit", "hit"] if there else ["miss"] * 4)
    own = ChunkStore.open(tmp_path / "own")
    writer = ChunkWriter(torch_engine, own, spec, text.prefix)
    for chunk in text.chunks:
        key = writer.write(chunk.token_ids)
        kept = []
        for one in (own, store):
            with one.open_entry(key) as entry:
                parts = [bytearray(part) for layer in range(4) for part in entry.layer(layer)]
            kept.append(torch.frombuffer(bytearray().join(parts), dtype=torch.float32))
        torch.testing.assert_close(*kept, rtol=1e-3, atol=1e-4)


def test_all_recomputed_is_as_vllm_computes_it(served):
    text = make_text(seed=50)
    served.ask(text.prompt([0, 1, 2, 3]))
    worst = 0.0
    for order in (ORDER, (3, 2, 1, 0), (1, 3)):
        prompt = text.prompt(order)
        served.forget()
        plain = served.ask(prompt.token_ids, steps=3)
        answer = served_answer(served, prompt)
        assert answer.token_ids == plain.token_ids
        worst = max(worst, float(divergence(plain.logprobs, answer.logprobs).mean()))
    assert worst <= 1e-4


def served_answer(served, prompt):
    served.forget()
    answer = served.ask(prompt, steps=3, ratio=0.999)
    assert answer.raw.kv_transfer_params["cacheblend"]["status"] == "blended"
    return answer


@pytest.mark.parametrize(
    "wishes",
    [
        dict(policy="value", ratio=0.2),
        dict(policy="key+value", threshold=0.5),
        dict(policy="attention", ratio=0.2),
        dict(policy="question", ratio=0.2),
        dict(policy="question:heads=max", threshold=0.5),
        dict(policy="hybrid", ratio=0.2),
    ],
    ids=str,
)
def test_every_rank_selects_what_one_alone_does(served, wishes, torch_engine, spec, store_dir):
    """One alone is the torch engine, on the same store: of chunks that it ingested."""
    text = make_text(seed=70)
    store = ChunkStore.open(store_dir)
    ChunkWriter(torch_engine, store, spec, text.prefix).write_missing(text.chunks)
    store.close()
    prompt = text.prompt(ORDER)
    expected = by_torch(torch_engine, spec, store_dir, prompt, **wishes)
    answer, ranks = blended(served, prompt, **wishes)
    assert statuses(answer) == ["exact", "hit", "hit", "hit"]
    assert 0 < len(expected.selected) < expected.cached_tokens
    for rank in ranks:
        assert rank["selected"] == expected.selected
    assert divergence(expected.logits.log_softmax(-1), answer.logprobs).mean() <= 1e-4


def test_a_rank_with_other_scores_follows(served):
    text = make_text(seed=50)
    served.ask(text.prompt([0, 1, 2, 3]))
    _, straight = blended(served, text.prompt(ORDER), ratio=0.2, policy="value")
    served.llm.collective_rpc(probes.skew, args=(1, True))
    _, ranks = blended(served, text.prompt(ORDER), ratio=0.2, policy="value")
    served.llm.collective_rpc(probes.skew, args=(1, False))
    assert ranks[1]["scores"] != ranks[0]["scores"] == straight[0]["scores"]
    assert {rank["selected"] for rank in ranks} == {straight[0]["selected"]}
    assert [rank["heads"][0] for rank in ranks] == [
        index * 6 // len(ranks) for index in range(len(ranks))
    ]


def test_an_entry_that_one_rank_alone_finds_damaged(served, spec, store_dir):
    text = make_text(seed=90)
    served.ask(text.prompt([0, 1, 2, 3]))
    store = ChunkStore.open(store_dir)
    key = store.find(spec, text.chunks[3].token_ids, text.prefix).key
    served.llm.collective_rpc(probes.damage, args=(1, key, 2))
    answer, ranks = blended(served, text.prompt(ORDER), ratio=0.2)
    assert statuses(answer) == ["exact", "hit", "miss", "hit"]
    assert len({tuple(rank["statuses"]) for rank in ranks}) == 1
    assert len({rank["selected"] for rank in ranks}) == 1
    plain = served.ask(text.prompt(ORDER).token_ids)
    assert divergence(plain.logprobs, answer.logprobs).mean() < 1  # nothing was made of zeros


def test_a_rank_that_cannot_go_on_ends_the_engine_and_hangs_nobody(served):
    """The last test of an engine."""
    text = make_text(seed=50)
    served.llm.collective_rpc(probes.fail_to_write, args=(1, 0.5))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):  # as vLLM has it when a worker ends
        served.ask(text.prompt((1, 0, 2)), ratio=0.2)
    assert time.monotonic() - began < 60
