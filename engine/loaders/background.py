"""Loading while computing: what `pipelined`, `async` and `prefetch` share."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import torch

from engine.loaders.base import LayerLoader
from engine.threads import use_all_cores


class BackgroundLoader(LayerLoader):
    """`threads` threads load layers in turn, as far ahead as there is `space`.

    What goes wrong in a thread is raised by `layer` for the layer it happened in.
    """

    threads: ClassVar[int]
    _pool: ThreadPoolExecutor | None = None

    def _begin(self) -> None:
        self._futures: dict[int, Future[list[torch.Tensor]]] = {}
        if self._entries:
            self._pool = ThreadPoolExecutor(
                self.threads, thread_name_prefix="load-kv", initializer=use_all_cores
            )
        for index in range(self._room):
            self._ask(index)

    def _ask(self, index: int) -> None:
        if self._pool is not None and index < self._layers:
            self._futures[index] = self._pool.submit(self._load, index)

    def _take(self, index: int) -> list[torch.Tensor]:
        return self._futures.pop(index).result() if self._pool is not None else []

    def _released(self, index: int) -> None:
        self._ask(index + self._room)

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
