"""The engine core in a process of its own, as servers run it: streaming, aborts, idle saves."""

import asyncio
import gc
import time
from contextlib import aclosing

import pytest

from cache_store.store import ChunkStore
from engine.prompt import Prompt
from tests.vllm.worlds import SMALL, extra_args, make_text, sampling, with_connector

PATIENCE = 60.0  # seconds, for what takes one


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store"
    ChunkStore.open(path, limit_bytes=10**9).close()
    return path


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(tiny_dir, store_dir, loop):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = tiny_dir("llama")
    options = SMALL | with_connector(model, store_dir, {"step_tokens": 300})
    args = AsyncEngineArgs(model=str(model), dtype="float32", **options)

    async def start():
        return AsyncLLM.from_engine_args(args)

    running = loop.run(start())
    yield running
    running.shutdown()
    del running
    gc.collect()


async def stream(engine, name, prompt, steps=6, **wishes):
    """Pieces of the answer as they come, and what was reported."""
    from vllm.sampling_params import RequestOutputKind

    named = isinstance(prompt, Prompt)
    params = sampling(steps, False, extra_args(prompt, **wishes) if named else None)
    params.output_kind = RequestOutputKind.DELTA
    given = {"prompt_token_ids": list(prompt.token_ids if named else prompt)}
    pieces, report = [], None
    async with aclosing(engine.generate(given, params, name)) as outputs:
        async for output in outputs:
            pieces.append(tuple(output.outputs[0].token_ids))
            report = output.kv_transfer_params
    return pieces, report and report["cacheblend"]


def joined(pieces):
    return tuple(token for piece in pieces for token in piece)


def wait_for_entries(store_dir, number):
    store = ChunkStore.open(store_dir, read_only=True)
    end = time.monotonic() + PATIENCE
    while len(list(store.entries())) < number:
        assert time.monotonic() < end, "missed chunks were not stored while vLLM was idle"
        time.sleep(0.05)


def test_what_missed_is_stored_while_nobody_asks(engine, store_dir, loop):
    text = make_text(seed=1)
    pieces, report = loop.run(stream(engine, "cold", text.prompt([0, 1, 2, 3])))
    assert report["status"] == "full"
    assert report["saving"] == 4
    assert len(pieces) > 2, "it comes piece by piece"
    wait_for_entries(store_dir, 5)
    again, report = loop.run(stream(engine, "warm", text.prompt([3, 1, 0, 2]), ratio=0.5))
    assert report["status"] == "blended"
    assert report["chunk_tokens"]["miss"] == 0
    assert report["recomputed"]["tokens"] > 0
    assert len(again) > 2


def test_aborts_among_others(engine, store_dir, loop):
    text = make_text(seed=1)  # stored by the test before, or missed: the answers are the same

    async def together():
        asked = {
            "blended": stream(engine, "blended", text.prompt([3, 2, 0]), steps=20, ratio=0.5),
            "plain": stream(engine, "plain", text.prompt([1, 0]).token_ids, steps=20),
        }
        gone = [
            asyncio.create_task(stream(engine, f"gone{n}", text.prompt(order), steps=400))
            for n, order in enumerate(([2, 0, 1], [0, 2], [1, 2, 3]))
        ]
        tasks = {name: asyncio.create_task(task) for name, task in asked.items()}
        await asyncio.sleep(0.1)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        return {name: await task for name, task in tasks.items()}

    async def alone():
        blended = await stream(engine, "b", text.prompt([3, 2, 0]), steps=20, ratio=0.5)
        plain = await stream(engine, "p", text.prompt([1, 0]).token_ids, steps=20)
        return {"blended": blended, "plain": plain}

    first, second = loop.run(together()), loop.run(alone())
    for name in ("blended", "plain"):
        assert joined(first[name][0]) == joined(second[name][0])
        assert len(joined(first[name][0])) == 20
    assert second["blended"][1]["held_tokens"] > 0
    assert first["plain"][1] is None
