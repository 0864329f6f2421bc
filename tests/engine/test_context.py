"""Chunks behind the prefix, its first token or nothing: side by side, and which one is used."""

from pathlib import Path

import pytest
import torch

from cache_store.errors import UsageError
from engine.api import Engine
from engine.blueprint import Blueprint
from engine.context import CONTEXT_KINDS, kind_behind
from engine.options import BlendOptions
from engine.precompute import ChunkWriter
from engine.prompt import lay_out
from tests.engine.blend_world import World, ids, make_world
from tests.engine.test_precompute import alone
from tests.engine.test_template import CHATML
from tests.engine.tiny_models import TINY, Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

BY_NAME = {tiny.name: tiny for tiny in TINY}
ARCHITECTURES = (
    *("llama", "mistral-window", "qwen3", "smollm3-window", "llama-dynamic-past"),
    *("phi3-partial-window", "phi3-longrope-long"),
)
ALL = BlendOptions.of(ratio="0", min_tokens=0)


def context_of(world: World, kind: str) -> tuple[int, ...]:
    return {"prefix": world.prefix, "bos": world.prefix[:1], "none": ()}[kind]


def ingest(world: World, *kinds: str) -> None:
    """Every chunk behind each of these contexts."""
    for kind in kinds:
        writer = ChunkWriter(
            world.model, world.store, world.spec, context_of(world, kind), world.prefix
        )
        assert writer.write_missing(world.chunks) == len(world.chunks)


def shared(world: World, prompt) -> list[tuple[int, int]]:
    """Length of the recorded context, and how much of it is the actual one, chunk by chunk."""
    matches = [s.match for s in world.prefill(prompt, ratio=0).found if s.segment.kind == "chunk"]
    assert None not in matches
    return [(len(m.context), m.shared) for m in matches if m is not None]


def statuses(world: World, prompt, **options) -> list[str]:
    found = world.prefill(prompt, **{"ratio": 0, **options}).found
    return [source.status for source in found]


@pytest.mark.parametrize("kind", ["bos", "none"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_identities_behind_every_context(name: str, kind: str, tmp_path: Path) -> None:
    """Ratio 1 in any order equals full prefill, whatever the chunks were computed behind; and at
    ratio 0, one chunk in a prompt that begins with that very context does."""
    world = make_world(BY_NAME[name], tmp_path)
    ingest(world, kind)
    prompt = world.prompt((3, 1, 0))
    for ratio in ("1", "0.999999999"):  # under 1 it is the layer loop that computes everything
        run = world.prefill(prompt, ratio=ratio)
        assert (run.logits[0] - world.full(prompt)).abs().max() <= 1e-4
    context, chunk, regime = context_of(world, kind), world.chunks[1], world.model.rope.regime
    prompt = lay_out(context, [chunk], (), world.suffix)
    run = world.prefill(prompt, ratio=0)
    if regime(len(prompt.token_ids)) == regime(len(context) + len(chunk.token_ids)):
        assert run.found[-2].status == "exact"
        assert (run.logits[0] - world.full(prompt)).abs().max() <= 1e-4
    else:
        assert run.found[-2].status == "hit"


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_exactly_behind_the_equal_context_only(kind: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    ingest(world, kind)
    first = "exact" if kind == "prefix" else "hit"
    assert statuses(world, world.prompt((1, 0))) == [
        *("exact", first, "computed", "hit", "computed"),
    ]
    for other in (world.prefix[:1], (), (world.prefix[0], *ids(6, 77)), ids(5, 78)):
        prompt = lay_out(other, [world.chunks[1]], (), world.suffix)
        expected = "exact" if other == context_of(world, kind) else "hit"
        assert statuses(world, prompt)[-2] == expected


def test_the_longest_shared_context_wins_and_the_equal_one_first(tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    prompt = world.prompt((1, 0))
    length = len(world.prefix)
    ingest(world, "none")
    assert shared(world, prompt) == [(0, 0)] * 2
    ingest(world, "bos")
    assert shared(world, prompt) == [(1, 1)] * 2
    ingest(world, "prefix")
    assert shared(world, prompt) == [(length, length)] * 2
    assert len(list(world.store.entries())) == 3 * len(world.chunks) + 1  # and the prefix
    # Another system prompt behind the same opening: as much of the old prefix as is the same.
    changed = lay_out((*world.prefix[:1], *ids(8, 50)), world.chunks[:2], (), world.suffix)
    assert shared(world, changed) == [(1, 1)] * 2
    nearer = lay_out((*world.prefix[:4], *ids(8, 50)), world.chunks[:2], (), world.suffix)
    assert shared(world, nearer) == [(length, 4)] * 2
    strangers = lay_out(ids(8, 50), world.chunks[:2], (), world.suffix)
    assert shared(world, strangers) == [(0, 0)] * 2
    bare = lay_out((), world.chunks[:1], (), world.suffix)
    assert statuses(world, bare) == ["exact", "computed"]


def test_strict_context_takes_what_was_computed_behind_this_very_prefix(tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    ingest(world, "bos", "none")
    prompt = world.prompt((1, 0))
    for order in (prompt, lay_out(world.prefix[:2], world.chunks[:2], (), world.suffix)):
        kinds = statuses(world, order, strict_context=True)
        assert [kind for kind in kinds if kind in ("hit", "miss", "exact")][-2:] == ["miss"] * 2
    ingest(world, "prefix")
    assert statuses(world, prompt, strict_context=True)[1] == "exact"
    bare = lay_out(world.prefix[:1], world.chunks[:2], (), world.suffix)
    assert statuses(world, bare, strict_context=True)[1:3] == ["exact", "hit"]


@pytest.mark.parametrize("name", ["llama", "llama-dynamic-past", "phi3-longrope-long"])
def test_what_is_stored_is_the_chunk_behind_its_context(name: str, tmp_path: Path) -> None:
    """K before RoPE and V equal a plain pass over context and chunk, in that one's regime."""
    world = make_world(BY_NAME[name], tmp_path)
    ingest(world, "bos", "none")
    for kind in ("bos", "none"):
        context = context_of(world, kind)
        writer = ChunkWriter(world.model, world.store, world.spec, context)
        for chunk in world.chunks:
            key = writer.held(chunk.token_ids)
            assert key is not None
            wanted = alone(world.model, chunk, context).flatten()
            assert (read(world, key) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def read(world: World, key: str) -> torch.Tensor:
    with world.store.open_entry(key) as reader:
        layers = [reader.layer(index) for index in range(world.model.config.layers)]
        halves = [bytearray(half) for kv in layers for half in kv]
    return torch.cat([torch.frombuffer(half, dtype=torch.float32) for half in halves])


# The engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), path)
    return write_tokenizer(path, chat_template=CHATML)


def engine_of(folder: Path, store, **settings: str) -> Engine:
    return Engine.load(folder, store=store, device="cpu", dtype="fp32", **settings)


@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_what_an_engine_misses_is_stored_behind_its_context(
    folder: Path, kind: str, tmp_path: Path
) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)  # for its store
    engine = engine_of(folder, world.store, context=kind)
    chunks = [engine.chunk(text) for text in ("The tide turns.", "The boat leaves at six.")]
    missed = engine.ask("When?", chunks, blend=ALL)
    assert [s.status for s in missed.prompt.segments if s.kind == "chunk"] == ["miss", "miss"]
    stored = {entry.chunk_id: entry for entry in world.store.entries()}
    context = engine.template.context(kind)  # type: ignore[arg-type]
    for chunk in chunks:
        assert stored[chunk.chunk_id or ""].context_tokens == len(context)
        assert kind_behind(len(context)) == kind
        assert engine.writer().held(chunk.token_ids)
    assert engine.precompute(chunks) == 0
    again = engine.ask("When?", chunks[::-1], blend=ALL)
    first = "exact" if kind == "prefix" else "hit"
    assert [s.status for s in again.prompt.segments if s.kind in ("prefix", "chunk")] == [
        *("exact", first, "hit"),
    ]
    # Under another system prompt, misses go behind that one's prefix, or the same short context.
    other = engine_of(folder, world.store, context=kind, system="Be kind.")
    new = other.chunk("The lamp burns oil.")
    other.ask("What burns?", [new])
    wanted = other.template.prefix if kind == "prefix" else context
    assert other.store is not None
    match = other.store.find(other.spec, new.token_ids, wanted)
    assert match is not None
    assert match.exact


def test_an_unknown_context_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="context 'whole' is unknown"):
        Blueprint.open(folder, context="whole")


def test_room_for_a_chunk_is_what_its_context_leaves(tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    size = world.model.config.context - len(world.prefix)
    bare = ChunkWriter(world.model, world.store, world.spec, (), world.prefix)
    assert bare.write(ids(size, 5))
    with pytest.raises(UsageError, match="does not fit"):
        world.writer.write(ids(size, 5))
