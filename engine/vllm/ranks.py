"""Ranks that are joined by torch's process groups, as vLLM's tensor-parallel ones are."""

from datetime import timedelta

import torch
import torch.distributed as dist

from engine.ranks import Ranks, Share


class GroupRanks(Ranks):
    """device: a group for tensors where the model is; host: one of the same processes for those on
    the host (gloo). kv_heads: the whole model's."""

    def __init__(self, device: dist.ProcessGroup, host: dist.ProcessGroup, kv_heads: int) -> None:
        self.rank, self.size = dist.get_rank(host), dist.get_world_size(host)
        self.share = Share.of(self.rank, self.size, kv_heads)
        self._device, self._host = device, host

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self._device)
        return total

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        most = x.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._device)
        return most

    def chosen(self, indices: torch.Tensor, count: int) -> torch.Tensor:
        marks = torch.zeros(count, dtype=torch.uint8, device=indices.device)
        marks[indices] = 1
        dist.broadcast(marks, group=self._device, group_src=0)
        return marks.nonzero().flatten()

    def whole(self, kv: torch.Tensor) -> torch.Tensor:
        assert self.share is not None
        # As bytes, for not every group knows every type.
        own = kv.contiguous().view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.leads else None
        dist.gather(own, parts, group=self._host, group_dst=0)
        if parts is None:
            return kv
        return torch.cat([p.view(kv.dtype) for p in parts[:: self.share.copies]], dim=-2)

    def exchanged(self, said: str, seconds: float | None = None) -> tuple[str, ...]:
        data = said.encode()
        longest = torch.tensor([len(data)])
        work = dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._host, async_op=True)
        try:
            work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise TimeoutError(f"rank {self.rank} waited in vain for the others") from error
        size = int(longest)
        if not size:
            return ("",) * self.size
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(heard, mine, group=self._host)
        return tuple(bytes(x.numpy()).rstrip(b"\0").decode() for x in heard)
