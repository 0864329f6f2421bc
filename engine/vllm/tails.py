"""KV behind the last full block of blended prompts, which vLLM's prefix cache does not keep."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from engine.kv_cache import KVCache
from engine.vllm.paged import PagedKV
from engine.vllm.plan import BlendPlan

MOST_BYTES = 32 * 2**20


class TailedKV(PagedKV):
    """Remembers what was last written behind each prompt's last full block.

    A request that is blended a second time, with another question or for another of several
    answers, finds all full blocks in vLLM's prefix cache; without the few tokens that are left it
    would be blended all over again. limit: bytes that are kept in all.
    """

    def __init__(
        self,
        attention: Mapping[str, Any],
        block_size: int,
        device: torch.device,
        limit: int = MOST_BYTES,
    ) -> None:
        super().__init__(attention, block_size, device)
        self._limit, self._bytes = limit, 0
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: OrderedDict[str, list[tuple[torch.Tensor, torch.Tensor]]] = OrderedDict()

    def write(self, layer: int, cache: KVCache, start: int, slots: torch.Tensor) -> None:
        super().write(layer, cache, start, slots)
        end = start + len(slots)
        tail = self._tail(end)
        if layer == 0:
            self._written = []
        if start <= tail < end:
            k, v = cache.rows(layer, tail, end)
            copies = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
            self._written.append((next(copies), next(copies)))

    def keep(self, plan: BlendPlan) -> None:
        """To be called when all layers of a plan are written."""
        self.forget(plan)
        written, self._written = self._written, []
        size = _size(written)
        whole = len(written) == len(self._layers)
        if not plan.salt or not whole or size > self._limit:
            return
        self._kept[plan.salt] = written
        self._bytes += size
        while self._bytes > self._limit:
            self._bytes -= _size(self._kept.popitem(last=False)[1])

    def restore(self, plan: BlendPlan) -> bool:
        """Writes what is left of a plan, if it is only that and known; returns whether it was."""
        end = plan.request.end
        kept = self._kept.get(plan.salt)
        if kept is None or not plan.held or plan.held != self._tail(end):
            return False
        self._kept.move_to_end(plan.salt)
        slots = self.slots(plan.block_ids, plan.held, end)
        for layer, (k, v) in enumerate(kept):
            self.put(layer, k, v, slots)
        return True

    def forget(self, plan: BlendPlan) -> None:
        self._bytes -= _size(self._kept.pop(plan.salt, []))

    def _tail(self, end: int) -> int:
        return end // self.block_size * self.block_size


def _size(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(k.nbytes + v.nbytes for k, v in kept)
