"""One of the processes that `test_ranks` joins: `python -m … RANK SIZE FILE-TO-MEET-BY`."""

import sys

import torch
import torch.distributed as dist

from engine.vllm.ranks import GroupRanks


def main(rank: int, size: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    host, device = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    for kv_heads in (size, 1):
        check(GroupRanks(device, host, kv_heads), rank, size, kv_heads)
    dist.barrier()
    if rank == 1:  # the others have gone on
        try:
            GroupRanks(device, host, size).exchanged("where are you", 0.3)
        except TimeoutError as error:
            sys.stdout.write(f"{error}\n")
    sys.stdout.write("done\n")


def check(ranks: GroupRanks, rank: int, size: int, kv_heads: int) -> None:
    share = ranks.share
    assert (ranks.rank, ranks.size, ranks.leads) == (rank, size, rank == 0)
    assert share is not None

    mine = torch.tensor([1.0, -2.0, float(rank)])
    sums = [size, -2.0 * size, size * (size - 1) / 2]
    assert ranks.summed(mine).tolist() == sums
    assert ranks.kv_summed(mine).tolist() == [x / share.copies for x in sums]
    assert ranks.largest(mine).tolist() == [1, -2, size - 1]
    assert mine.tolist() == [1, -2, rank]  # as it was

    chosen = ranks.chosen(torch.tensor([1, 4] if rank == 0 else [0]), 6)
    assert chosen.tolist() == [1, 4]
    assert ranks.chosen(torch.tensor([], dtype=torch.int64), 6).tolist() == []

    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.arange(2 * 5 * kv_heads * 4).view(2, 5, kv_heads, 4).to(dtype)
        got = ranks.whole(whole[:, :, share.slice()])
        assert torch.equal(got, whole if rank == 0 else whole[:, :, share.slice()])

    assert ranks.exchanged("") == ("",) * size
    assert ranks.exchanged("größer" * rank) == tuple("größer" * other for other in range(size))
    assert ranks.exchanged("x" * 1000 if rank == 1 else "", 30.0)[1] == "x" * 1000


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
