"""`sync`: everything first."""

import torch

from engine.loaders.base import LayerLoader


class SyncLoader(LayerLoader):
    """Loads what is needed of all layers, then lets the first one be computed.

    The plainest way, without a thread: what the others are measured against.
    """

    name = "sync"

    def _begin(self) -> None:
        with self._watch.stall:
            self._loaded = [self._load(index) for index in range(self._layers)]
        self._stall_s = list(self._load_s)

    def _take(self, index: int) -> list[torch.Tensor]:
        return self._loaded[index]
