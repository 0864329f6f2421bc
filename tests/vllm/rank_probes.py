"""What tests do in each tensor-parallel worker, by vLLM's `collective_rpc`."""

from typing import Any

from cache_store.errors import IntegrityError
from engine.vllm import lockstep


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


class Runs(list[Any]):
    """A listener of a worker's: what it has blended last, in order."""

    def ran(self, run: Any) -> None:
        self.append(run)
        del self[:-16]

    def failed(self, plan: Any, error: Exception) -> None:
        return


def watch(worker: Any) -> None:
    """Keeps each rank's runs, for `last_run`."""
    _connector().steps.listeners.append(Runs())


def last_run(worker: Any) -> dict[str, Any]:
    """What the rank's last blend was."""
    runs = _connector().steps.listeners[-1]
    run, ranks = runs[-1], _connector().steps.worker.model.ranks
    return {
        "selected": run.blended.selected,
        "scores": [scores.tolist() for _, _, scores in run.blended.scores],
        "statuses": [s.status for s in run.sources],
        "heads": (ranks.share.first, ranks.share.count, ranks.share.copies),
    }


def damage(worker: Any, rank: int, key: str, layer: int) -> None:
    """One rank alone can't read an entry from a layer on."""
    side = _connector().steps.worker
    if side.model.ranks.rank != rank:
        return
    opened = side.store.open_entry

    def open_entry(wanted: str) -> Any:
        entry = opened(wanted)
        if wanted == key:
            read = entry.layer

            def one(index: int) -> Any:
                if index >= layer:
                    raise IntegrityError("damaged for this rank")
                return read(index)

            entry.layer = one
        return entry

    side.store.open_entry = open_entry


def skew(worker: Any, rank: int, on: bool) -> None:
    """One rank's scores are turned round."""
    ranks = _connector().steps.worker.model.ranks
    if ranks.rank != rank:
        return
    if on:
        summed = type(ranks).kv_summed
        ranks.kv_summed = lambda x: summed(ranks, x).flip(0)
    else:
        del ranks.kv_summed


def fail_to_write(worker: Any, rank: int, patience: float) -> None:
    """One rank can't write to its blocks."""
    side = _connector().steps.worker
    lockstep.PATIENCE = patience

    def write(*given: Any) -> None:
        raise MemoryError("no memory on this rank")

    if side.model.ranks.rank == rank:
        side.paged.write = write
