"""Tensor-parallel ranks as threads, each with its share of a tiny model: no vLLM, no processes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from cache_store.store import ChunkStore
from engine.kv_cache import KVCache
from engine.model import Decoder
from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.ranks import ALONE, Ranks, Share
from engine.sources import find_sources
from engine.vllm.plan import BlendPlan, RequestPlan
from engine.vllm.worker import BlendRun, BlendWorker
from tests.engine.blend_world import World, make_world
from tests.engine.tiny_models import Tiny

T = TypeVar("T")

WAIT = 60.0  # seconds; a test that hangs fails


class Meeting:
    """Where ranks wait for each other and see what each has brought."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=WAIT)
        self._brought: list[Any] = [None] * size

    def all(self, rank: int, value: Any, seconds: float | None = None) -> list[Any]:
        self._brought[rank] = value
        self.barrier.wait(seconds)
        seen = list(self._brought)
        self.barrier.wait()
        return seen


class ThreadRanks(Ranks):
    """talk: where words are exchanged; it is not where numbers are, as in `GroupRanks`."""

    def __init__(self, meeting: Meeting, talk: Meeting, rank: int, kv_heads: int) -> None:
        self.meeting, self.talk, self.rank, self.size = meeting, talk, rank, meeting.size
        self.share = Share.of(rank, self.size, kv_heads)
        self.exchanges = 0

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.all(self.rank, x.clone())).sum(0)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.all(self.rank, x.clone())).amax(0)

    def chosen(self, indices: torch.Tensor, count: int) -> torch.Tensor:
        assert not len(indices) or indices.max() < count
        first: torch.Tensor = self.meeting.all(self.rank, indices.clone())[0]
        return first.clone()

    def whole(self, kv: torch.Tensor) -> torch.Tensor:
        assert self.share is not None
        parts = self.meeting.all(self.rank, kv)
        return torch.cat(parts[:: self.share.copies], -2) if self.leads else kv

    def exchanged(self, said: str, seconds: float | None = None) -> tuple[str, ...]:
        self.exchanges += 1
        try:
            return tuple(self.talk.all(self.rank, said, seconds))
        except threading.BrokenBarrierError as error:
            raise TimeoutError("the others don't come") from error


class SplitDecoder(Decoder):
    """One rank's share of a model without biases, as vLLM splits it."""

    def __init__(self, whole: Decoder, ranks: Ranks) -> None:
        c, share = whole.config, ranks.share
        assert share is not None
        d, rank, size = c.head_dim, ranks.rank, ranks.size

        def rows(weight: torch.Tensor) -> torch.Tensor:
            return weight.chunk(size)[rank].contiguous()

        def columns(weight: torch.Tensor) -> torch.Tensor:
            return weight.chunk(size, 1)[rank].contiguous()

        def heads(weight: torch.Tensor) -> torch.Tensor:
            return weight[share.first * d : (share.first + share.count) * d].contiguous()

        layers = tuple(
            replace(
                layer,
                **{name: rows(getattr(layer, name)) for name in ("q", "gate", "up")},
                **{name: columns(getattr(layer, name)) for name in ("o", "down")},
                **{name: heads(getattr(layer, name)) for name in ("k", "v")},
            )
            for layer in whole.weights.layers
        )
        super().__init__(
            replace(
                c,
                heads=c.heads // size,
                kv_heads=share.count,
                intermediate=c.intermediate // size,
            ),
            replace(whole.weights, layers=layers),
        )
        self.ranks = ranks

    def finish(self, layer: int, x: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        w, eps = self.weights.layers[layer], self.config.rms_norm_eps
        projected = self.ranks.summed(attention @ w.o.t())
        normed = self.kernels.add_norm(x, projected, w.post_norm, eps, self._kept("norm", x.shape))
        shape = (x.shape[0], self.config.intermediate)
        gate = self.kernels.gated(
            normed, w, self.config.activation, lambda slot: self._kept(slot, shape)
        )
        return x.add_(self.ranks.summed(gate @ w.down.t()))


class Blocks:
    """Stands for `PagedKV`: keeps what is written. kv: by layer, [2, kv_heads, T, head_dim]."""

    def __init__(self) -> None:
        self.kv: dict[int, torch.Tensor] = {}

    def slots(self, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end)

    def write(self, layer: int, cache: KVCache, start: int, slots: torch.Tensor) -> None:
        end = start + len(slots)
        self.kv[layer] = torch.stack([cache.k[layer, :, :end], cache.v[layer, :, :end]]).clone()


@dataclass
class Rank:
    """What one rank has."""

    ranks: Ranks
    worker: BlendWorker
    blocks: Blocks


@dataclass
class Team:
    """Several ranks of one world's model, on its store."""

    world: World
    ranks: list[Rank]
    meetings: tuple[Meeting, Meeting]

    def all(self, action: Callable[[Rank], T]) -> list[T | BaseException]:
        """Lets every rank do the same at once; gives what it returned, or raised."""

        def one(rank: Rank) -> T | BaseException:
            try:
                with torch.inference_mode():
                    return action(rank)
            except BaseException as error:
                if not isinstance(error, Exception):
                    for meeting in self.meetings:  # its process has ended
                        meeting.barrier.abort()
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(one, self.ranks))

    def blend(self, plan: BlendPlan) -> list[BlendRun]:
        runs = []
        for run in self.all(lambda rank: rank.worker.blend(plan)):
            if isinstance(run, BaseException):
                raise run
            runs.append(run)
        return runs

    def kv(self) -> torch.Tensor:
        """What the ranks wrote, of all heads: [layers, 2, kv_heads, T, head_dim]."""
        parts = []
        for rank in self.ranks:
            parts.append(torch.stack([kv for _, kv in sorted(rank.blocks.kv.items())]))
        copies = self.ranks[0].ranks.share.copies if self.ranks[0].ranks.share else 1
        return torch.cat(parts[::copies], 2)


def shape(heads: int, kv_heads: int) -> Tiny:
    return Tiny(
        f"{heads}-{kv_heads}",
        "Llama",
        dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8),
    )


def make_team(world: World, size: int, ranks: type[ThreadRanks] = ThreadRanks) -> Team:
    meetings, members = (Meeting(size), Meeting(size)), []
    for number in range(size):
        one: Ranks = ALONE
        model = world.model
        if size > 1:
            one = ranks(*meetings, number, world.model.config.kv_heads)
            model = SplitDecoder(world.model, one)
        store = ChunkStore.open(world.store.path)
        blocks = Blocks()
        worker = BlendWorker(model, store, world.spec, blocks)  # type: ignore[arg-type]
        members.append(Rank(one, worker, blocks))
    return Team(world, members, meetings)


def plan_for(world: World, prompt: Prompt, **options: Any) -> BlendPlan:
    chosen = BlendOptions.of(**{"min_tokens": 0, "policy": "value", "ratio": "0.3", **options})
    regime = world.model.rope.regime(len(prompt.token_ids))
    sources = find_sources(prompt, world.store, world.spec, regime, chosen.mode, False)
    return BlendPlan(RequestPlan("r", prompt, chosen), sources, (0, 1, 2), 0)


def make(path: Path, heads: int, kv_heads: int) -> World:
    return make_world(shape(heads, kv_heads), path)
