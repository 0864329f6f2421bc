"""Loaders: when stored KV is read, and how much of it is in memory at once.

To add one: subclass `LayerLoader` (or `BackgroundLoader`) in a file of its own and name it in
`_LOADERS`. It decides when, and in which thread, `_load` is called for a layer. All of them give
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_store.errors import UsageError
from engine.loaders.asynchronous import AsyncLoader
from engine.loaders.base import DamagedSource, LayerLoader, LoadedSegment
from engine.loaders.pipelined import PipelinedLoader
from engine.loaders.prefetch import PrefetchLoader
from engine.loaders.sync import SyncLoader
from engine.timing import Stopwatch

if TYPE_CHECKING:
    from engine.codec import Codec
    from engine.model import Decoder
    from engine.sources import KVStore, Source

_LOADERS: dict[str, type[LayerLoader]] = {
    loader.name: loader for loader in (PipelinedLoader, SyncLoader, AsyncLoader, PrefetchLoader)
}
LOADER_NAMES = tuple(_LOADERS)


def check_loader(name: str) -> None:
    """Raises UsageError for an unknown name."""
    if name not in _LOADERS:
        raise UsageError(f"loader {name!r} is unknown", "use one of " + ", ".join(LOADER_NAMES))


def make_loader(
    name: str,
    model: Decoder,
    store: KVStore | None,
    sources: Sequence[Source],
    watch: Stopwatch,
    codec: Codec,
) -> LayerLoader:
    """The loader of that name for one prompt; codec: of the store's entries.

    Raises UsageError, DamagedSource.
    """
    check_loader(name)
    return _LOADERS[name](model, store, sources, watch, codec)


__all__ = [
    "LOADER_NAMES",
    "DamagedSource",
    "LayerLoader",
    "LoadedSegment",
    "check_loader",
    "make_loader",
]
