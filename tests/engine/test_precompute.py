"""Chunk KV computed in batches: the same as alone, stored in order, whatever stops it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cache_store.errors import StoreFullError, UsageError
from cache_store.store import ChunkStore
from engine import precompute
from engine.forward import forward
from engine.model import Decoder
from engine.precompute import ChunkWriter, Precomputer
from engine.prompt import PromptChunk
from tests.engine.blend_world import World, ids, make_world
from tests.engine.tiny_models import TINY, Tiny, build

CONTEXT = ids(9, 1)
SIZES = (30, 1, 75, 30, 57, 110, 2)


def chunks_of(sizes: Sequence[int], seed: int = 100) -> list[PromptChunk]:
    return [PromptChunk(ids(n, seed + i), f"{seed + i:064x}") for i, n in enumerate(sizes)]


def batches(writer: ChunkWriter, chunks: Sequence[PromptChunk]) -> list[list[PromptChunk]]:
    return list(writer.batches(chunks))


def computed(model: Decoder, chunks: Sequence[PromptChunk]) -> list[torch.Tensor]:
    """[layers, 2, tokens, kv_heads * head_dim] of each chunk, computed in one batch."""
    batch = Precomputer(model, CONTEXT).batch(chunks)
    sizes = [len(chunk.token_ids) for chunk in batch.chunks]
    return list(batch.kv.flatten(3).clone().split(sizes, dim=2))


def alone(model: Decoder, chunk: PromptChunk, context: Sequence[int] = CONTEXT) -> torch.Tensor:
    """The same from a plain forward pass over context and chunk, nothing batched."""
    token_ids = (*context, *chunk.token_ids)
    found: list[torch.Tensor] = []
    forward(
        model,
        model.new_cache(len(token_ids)),
        token_ids,
        model.rope.tables(len(token_ids)),
        last=0,
        capture=lambda layer, k, v: found.append(torch.stack([k, v]).flatten(2).clone()),
    )
    return torch.stack(found)[:, :, len(context) :]


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
def test_in_a_batch_as_alone(tiny: Tiny, tmp_path: Path) -> None:
    """Every architecture, RoPE kind, window and bias; also against transformers' own KV cache."""
    oracle = build(tiny, tmp_path)
    model = Decoder.load(tmp_path, "cpu", "fp32")
    writer = ChunkWriter(model, None, None, CONTEXT)  # type: ignore[arg-type]  # it stores nothing
    packed = batches(writer, chunks_of(SIZES))
    assert [chunk for batch in packed for chunk in batch] == chunks_of(SIZES)
    for batch in packed:
        for chunk, got in zip(batch, computed(model, batch), strict=True):
            expected = alone(model, chunk)
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
            compare_with_oracle(oracle, model, chunk, got)


def compare_with_oracle(
    oracle: transformers.PreTrainedModel, model: Decoder, chunk: PromptChunk, got: torch.Tensor
) -> None:
    rotary = oracle.model.rotary_emb  # dynamic RoPE remembers longer prompts; forget them
    oracle.model.rotary_emb = type(rotary)(oracle.config)
    length = len(CONTEXT) + len(chunk.token_ids)
    with torch.no_grad():
        cache = oracle(torch.tensor([[*CONTEXT, *chunk.token_ids]]), use_cache=True).past_key_values
    rows = model.rope.tables(length)[len(CONTEXT) : length]
    heads = (-1, model.config.kv_heads, model.config.head_dim)
    for layer, theirs in enumerate(cache.layers):
        k = model.rotated(layer, got[layer, 0].view(heads).clone(), rows)
        for ours, other in ((k, theirs.keys[0]), (got[layer, 1].view(heads), theirs.values[0])):
            kept = min(other.shape[1], len(ours))  # in a window's layer only the last ones are
            assert kept
            assert (ours[-kept:].transpose(0, 1) - other[:, -kept:]).abs().max() <= 1e-4


def test_batch_mates_do_not_matter(tmp_path: Path) -> None:
    build(TINY[0], tmp_path)
    for dtype in ("fp32", "bf16"):
        model = Decoder.load(tmp_path, "cpu", dtype)
        mine = PromptChunk(ids(40, 7), "m")
        first = computed(model, [mine, *chunks_of((50, 23), 300)])[0]
        # For the same number of rows a product rounds the same, wherever a row stands.
        assert torch.equal(computed(model, [*chunks_of((30, 43), 400), mine])[2], first)
        many = computed(model, [*chunks_of((90,) * 9, 500), mine])[9]
        assert (many - first).abs().max() <= (1e-6 if dtype == "fp32" else 2e-2) * first.abs().max()


def test_batches_hold_one_regime_and_so_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "BATCH_TOKENS", 100)
    world = make_world(by_name("phi3-longrope-long"), tmp_path)  # "long" beyond 64 with the prefix
    chunks = chunks_of((30, 20, 40, 11, 56, 200, 60, 50, 5))
    packed = batches(world.writer, chunks)
    sizes = [[len(chunk.token_ids) for chunk in batch] for batch in packed]
    assert sizes == [[30, 20, 40], [11], [56], [200], [60], [50, 5]]
    world = make_world(TINY[0], tmp_path / "plain")
    packed = batches(world.writer, chunks)
    sizes = [[len(chunk.token_ids) for chunk in batch] for batch in packed]
    assert sizes == [[30, 20, 40], [11, 56], [200], [60], [50, 5]]


def by_name(name: str) -> Tiny:
    return next(tiny for tiny in TINY if tiny.name == name)


@pytest.mark.parametrize("name", ["llama", "llama-dynamic-past", "phi3-longrope-long"])
def test_what_is_stored_serves_its_own_prompt_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several batches, and so over memory that is used again while it is written."""
    monkeypatch.setattr(precompute, "BATCH_TOKENS", 64)
    world = make_world(by_name(name), tmp_path, sizes=(30, 50, 30, 7, 61, 40, 22, 90, 12))
    keys: list[str] = []
    world.writer.write_prefix()
    world.writer.write_all(world.chunks, lambda chunk, key: keys.append(key))
    assert len(set(keys)) == len(world.chunks)
    assert world.store.verify().problems == ()
    for number, (chunk, key) in enumerate(zip(world.chunks, keys, strict=True)):
        assert world.writer.held(chunk.token_ids) == key
        assert stored(world, key) == pytest.approx(expected(world, chunk), abs=1e-5)
        regime = world.model.rope.regime(len(world.prefix) + len(chunk.token_ids))
        prompt = world.prompt([number])
        if world.model.rope.regime(len(prompt.token_ids)) == regime:  # then it is exact
            run = world.prefill(prompt, ratio="0")
            assert (run.logits[0] - world.full(prompt)).abs().max() <= 1e-4


def stored(world: World, key: str) -> list[float]:
    with world.store.open_entry(key) as reader:
        layers = [reader.layer(index) for index in range(world.model.config.layers)]
        halves = [bytearray(half) for kv in layers for half in kv]
    return torch.cat([torch.frombuffer(half, dtype=torch.float32) for half in halves]).tolist()


def expected(world: World, chunk: PromptChunk) -> list[float]:
    assert world.prefix == CONTEXT
    return alone(world.model, chunk).flatten().tolist()


def test_missing_chunks_are_computed_once(tmp_path: Path) -> None:
    world = make_world(TINY[0], tmp_path)
    assert world.writer.write_missing([world.chunks[1]]) == 1
    twice = [*world.chunks, *world.chunks, PromptChunk((), "empty")]
    assert world.writer.write_missing(twice) == len(world.chunks) - 1
    assert world.writer.write_missing(twice) == 0
    assert len(list(world.store.entries())) == len(world.chunks) + 1  # and the prefix


def test_a_full_store_stops_it_and_keeps_what_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "BATCH_TOKENS", 100)
    world = make_world(TINY[0], tmp_path, sizes=(60,) * 12)
    told: list[str] = []
    fail_after(world.store, 5, monkeypatch)
    with pytest.raises(StoreFullError, match="no room for more"):
        world.writer.write_all(world.chunks, lambda chunk, key: told.append(key))
    assert told == [entry.key for entry in world.store.entries()]
    assert len(told) == 5


def fail_after(store: ChunkStore, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    put = store.put
    done = 0

    def limited(*args: Any, **named: Any) -> str:
        nonlocal done
        if done == count:
            raise StoreFullError("no room for more")
        done += 1
        return put(*args, **named)

    monkeypatch.setattr(store, "put", limited)


def test_an_interrupt_keeps_what_is_stored_and_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute, "BATCH_TOKENS", 100)
    world = make_world(TINY[0], tmp_path, sizes=(60,) * 12)

    def interrupted() -> Iterator[PromptChunk]:
        yield from world.chunks[:6]
        raise KeyboardInterrupt

    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        world.writer.write_all(interrupted(), lambda chunk, key: told.append(key))
    assert told == [entry.key for entry in world.store.entries()]
    assert len(told) < 6
    assert world.store.verify().problems == ()
    assert world.writer.write_missing(world.chunks) == len(world.chunks) - len(told)


def test_a_chunk_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    world = make_world(TINY[0], tmp_path)
    long = PromptChunk(ids(world.model.config.context - len(world.prefix), 9), "l")
    with pytest.raises(UsageError, match="does not fit"):
        world.writer.write_all([*world.chunks, long], lambda chunk, key: None)
    with pytest.raises(UsageError, match="does not fit"):
        world.writer.write(long.token_ids)
    assert list(world.store.entries()) == []
    world.writer.write_all([PromptChunk(long.token_ids[1:], "s")], lambda chunk, key: None)
    assert len(list(world.store.entries())) == 1
