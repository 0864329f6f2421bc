"""What must equal what: vLLM with and without blending, and the torch engine on the same store."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cache_store.store import ChunkStore
from engine.api import Engine
from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.sources import find_sources
from tests.vllm.worlds import FAMILIES, Served, Text, ids, make_text

STEPS = 4
ALL = "0.9999"  # of cached tokens; 1 itself is left to vLLM
POLICIES = (
    *("question", "value", "key", "key+value", "attention", "first-k", "random"),
    "hybrid:value=1,question=1",
)
NEW = 100  # seeds of texts that no test before has stored


@dataclass
class World:
    served: Served
    text: Text

    def plain(self, prompt: Prompt, steps: int = STEPS) -> Any:
        self.served.forget()
        return self.served.ask(prompt.token_ids, steps=steps)

    def blended(self, prompt: Prompt, steps: int = STEPS, **wishes: Any) -> Any:
        """Fails where vLLM didn't blend."""
        self.served.forget()
        before = self.served.runs[-1:]
        answer = self.served.ask(prompt, steps=steps, **wishes)
        assert self.run is not (before[0] if before else None), "it was not blended"
        return answer

    @property
    def run(self) -> Any:
        return self.served.runs[-1]

    @property
    def statuses(self) -> list[str]:
        return [s.status for s in self.run.sources if s.segment.kind == "chunk"]

    def ingest(self, text: Text, chunks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.served.ask(text.prompt(chunks))


def make(start: Any, family: str, **options: Any) -> World:
    world = World(start(family, **options), make_text())
    world.ingest(world.text)
    return world


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, start: Any) -> World:
    return make(start, request.param)


@pytest.fixture(scope="module")
def llama(start: Any) -> World:
    return make(start, "llama")


@pytest.fixture
def engine(llama: World) -> Any:
    """The torch engine on vLLM's model and store."""
    with llama.served.open_store() as store:
        yield Engine.load(llama.served.model_dir, store=store, dtype="fp32", device="cpu")


def divergence(of: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL of logarithms of probabilities."""
    return float((of.exp() * (of - other)).sum(-1).mean())


def assert_same(found: Any, expected: Any, atol: float = 1e-3) -> None:
    assert found.token_ids == expected.token_ids
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-4, atol=atol)


# Blended in full, as vLLM computes it.


@pytest.mark.parametrize("order", [(2, 1, 0, 3), (0, 3, 2), (1,)], ids=str)
def test_all_recomputed_is_what_vllm_computes(world: World, order: tuple[int, ...]) -> None:
    prompt = world.text.prompt(order)
    full = world.plain(prompt)
    assert_same(world.blended(prompt, ratio=ALL), full)
    hits = [p for s in world.run.sources if s.status == "hit" for p in places(s.segment)]
    assert list(world.run.blended.selected) == hits
    assert_same(world.blended(prompt, policy="explicit", indices=hits), full)


def test_what_is_exact_needs_nothing(world: World) -> None:
    """Chunk 0 behind its own prefix; chunks that are not stored are computed in place."""
    prompt = world.text.prompt([0])
    assert_same(world.blended(prompt, ratio=0), world.plain(prompt))
    assert world.statuses == ["exact"]
    assert sum(world.run.blended.per_layer) == 0
    other = make_text(seed=NEW)
    mixed = Text(
        world.text.prefix,
        (world.text.chunks[0], *other.chunks[1:3]),
        world.text.separator,
        world.text.suffix,
    ).prompt([0, 1, 2])
    full = world.plain(mixed)
    assert_same(world.blended(mixed, ratio=0, save=False), full)
    assert world.statuses == ["exact", "miss", "miss"]


def test_less_than_all_differs(llama: World) -> None:
    """Else the tests above would hold for an engine that blends nothing."""
    prompt = llama.text.prompt([2, 1, 0, 3])
    full, reused = llama.plain(prompt), llama.blended(prompt, ratio=0)
    assert llama.run.blended.selected == ()
    assert sum(llama.run.blended.per_layer) == 0
    assert divergence(full.logprobs[0], reused.logprobs[0]) > 0.01


def test_nothing_stored_is_plain(llama: World) -> None:
    text = make_text(seed=2 * NEW)
    prompt = text.prompt([0, 1, 2, 3])
    full, runs = llama.plain(prompt), len(llama.served.runs)
    llama.served.forget()
    missed = llama.served.ask(prompt, steps=STEPS, save=False)
    assert len(llama.served.runs) == runs
    assert missed.token_ids == full.token_ids
    assert torch.equal(missed.logprobs, full.logprobs)


@pytest.mark.parametrize("order", [(2, 1, 0, 3), (3, 2, 1, 0)], ids=str)
def test_small_prompts_and_shares(llama: World, order: tuple[int, ...]) -> None:
    """Of chunks of one token too; without separators and without a prefix."""
    text = make_text((1, 2, 17, 1), prefix=0, separator=0, suffix=1, seed=3 * NEW)
    for index in order:
        llama.ingest(text, (index,))
    prompt = text.prompt(order)
    full = llama.plain(prompt)
    for ratio in ("0", "0.001", "0.5", ALL):
        answer = llama.blended(prompt, ratio=ratio)
        assert len(answer.token_ids) == STEPS
    assert_same(answer, full)


# The torch engine on the same store.


@pytest.mark.parametrize("transfer", [False, True], ids=["still", "transfer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_both_engines_select_and_say_the_same(
    llama: World, engine: Engine, policy: str, transfer: bool
) -> None:
    prompt = llama.text.prompt([2, 0, 3, 1])
    wishes: dict[str, Any] = dict(policy=policy, ratio="0.2", transfer=transfer, check_layers=2)
    answer = llama.blended(prompt, steps=1, **wishes)
    options = BlendOptions.of(min_tokens=0, **wishes)
    run = engine.prefill(prompt, options)
    assert llama.run.blended.selected == run.selected
    assert llama.run.blended.per_layer == run.per_layer
    assert len(run.selected) == 46  # of 230
    expected = torch.log_softmax(run.logits, -1)
    torch.testing.assert_close(answer.logprobs, expected, rtol=1e-4, atol=1e-3)


def test_explicit_positions(llama: World, engine: Engine) -> None:
    prompt = llama.text.prompt([2, 0, 3, 1])
    chunks = [s for s in prompt.segments if s.kind == "chunk"]
    chosen = [p for s in chunks[1:] for p in places(s)[1::3]]  # the first one is exact
    wishes: dict[str, Any] = dict(policy="explicit", indices=chosen)
    answer = llama.blended(prompt, steps=1, **wishes)
    run = engine.prefill(prompt, BlendOptions.of(min_tokens=0, **wishes))
    assert list(llama.run.blended.selected) == chosen == list(run.selected)
    expected = torch.log_softmax(run.logits, -1)
    torch.testing.assert_close(answer.logprobs, expected, rtol=1e-4, atol=1e-3)


def test_what_one_engine_stores_the_other_one_finds(
    llama: World, engine: Engine, tmp_path: Any
) -> None:
    text = make_text(seed=4 * NEW)
    with ChunkStore.open(tmp_path / "other", limit_bytes=10**9) as other:
        torch_only = Engine(engine.model, engine.blueprint, store=other)
        torch_only.writer(text.prefix).write_missing(text.chunks)
        engine.writer(text.prefix).write_missing(text.chunks[:2])
        prompt = text.prompt([3, 2, 1, 0])
        llama.blended(prompt, ratio="0.2")  # stores what it missed
        assert llama.statuses == ["miss", "miss", "hit", "hit"]
        found = find_sources(prompt, engine.store, engine.spec, "", "blend", False)
        assert [s.status for s in found if s.segment.kind == "chunk"] == ["exact", *["hit"] * 3]
        for chunk in text.chunks:
            entries = []
            for store in (engine.store, other):
                match = store.find(engine.spec, chunk.token_ids, text.prefix)
                assert match is not None
                assert match.exact
                entries.append((match.key, layers_of(store, match.key, engine)))
            assert entries[0][0] == entries[1][0]
            torch.testing.assert_close(entries[0][1], entries[1][1], rtol=1e-5, atol=1e-5)


# Nothing else changes.


def test_the_same_request_twice(llama: World) -> None:
    prompt = llama.text.prompt([1, 3, 0])
    answers = [llama.blended(prompt, ratio="0.3", policy="question") for _ in range(2)]
    answers.append(llama.served.ask(prompt, steps=STEPS, ratio="0.3", policy="question"))
    assert len({answer.token_ids for answer in answers}) == 1
    assert torch.equal(answers[0].logprobs, answers[1].logprobs)
    torch.testing.assert_close(answers[2].logprobs, answers[0].logprobs, rtol=1e-4, atol=1e-3)


def test_later_chunks_never_reach_earlier_ones(llama: World) -> None:
    """Recomputed tokens see what is before them and nothing else, wherever they stand."""
    others = make_text(seed=5 * NEW)
    text = Text(llama.text.prefix, (*llama.text.chunks, *others.chunks), (), llama.text.suffix)
    llama.ingest(text, (4, 5, 6, 7))
    blocks = []
    for order in ((2, 1, 3, 0), (2, 1, 7, 4)):
        prompt = text.prompt(order)
        same, later = places(prompt.segments[2]), places(prompt.segments[3])
        chosen = same[::5] + later[::2]
        llama.blended(prompt, steps=1, policy="explicit", indices=chosen)
        blocks.append(kv_blocks(llama, (same[-1] + 1) // 32))
    assert len(blocks[0]) == 3
    for one, other in zip(*blocks, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_plain_requests_are_as_without_the_connector(start: Any) -> None:
    """One at a time, with vLLM's own prefix cache: before, between and after blended ones."""
    text = make_text()
    plain = [ids(150, 6), text.prompt([2, 1, 0, 3]).token_ids, ids(40, 7)]
    plain += [plain[1], plain[0] + ids(9, 8)]
    served = start("llama", connector=False)
    without = [served.ask(p, steps=6) for p in plain]
    world = World(start("llama"), text)
    answers = []
    for index, prompt in enumerate(plain):
        answers.append(world.served.ask(prompt, steps=6))
        order = [(0, 1, 2, 3), (2, 1, 0, 3), (3, 1, 2, 0), (2, 1), (2, 1, 0, 3)][index]
        world.served.ask(text.prompt(order), steps=3, ratio="0.3")
    assert len(world.served.runs) == 3, "the last is still in the blocks of the second"
    for found, expected in zip(answers, without, strict=True):
        assert found.token_ids == expected.token_ids
        assert torch.equal(found.logprobs, expected.logprobs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_all_recomputed_in_bfloat16(start: Any, family: str) -> None:
    world = make(start, family, dtype="bfloat16")
    found = []
    for order in ((2, 1, 0, 3), (3, 0, 1), (1, 0)):
        prompt = world.text.prompt(order)
        full, blended = world.plain(prompt, 1), world.blended(prompt, 1, ratio=ALL)
        found.append(divergence(full.logprobs, blended.logprobs))
    assert sum(found) / len(found) <= 0.005, found


def places(segment: Any) -> list[int]:
    return list(range(segment.start, segment.end))


def layers_of(store: Any, key: str, engine: Engine) -> torch.Tensor:
    """A stored chunk's K and V, float32 [2, layers, tokens, kv_heads, head_dim]."""
    c = engine.model.config
    with store.open_entry(key) as entry:
        rows = [
            [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in entry.layer(layer)]
            for layer in range(c.layers)
        ]
    k, v = ([row[i].view(-1, c.kv_heads, c.head_dim) for row in rows] for i in range(2))
    return torch.stack([torch.stack(k), torch.stack(v)])


def kv_blocks(world: World, count: int) -> list[torch.Tensor]:
    """What vLLM holds in the first so many blocks of the last blended request, one a block."""
    wanted = list(world.run.plan.block_ids[:count])
    held = []
    for layer in world.served.core.vllm_config.compilation_config.static_forward_context.values():
        cache = layer.kv_cache
        axis = cache.shape.index(world.served.core.vllm_config.cache_config.num_gpu_blocks)
        held.append(cache.index_select(axis, torch.tensor(wanted)).movedim(axis, 0).flatten(1))
    return list(torch.cat(held, 1).clone())
