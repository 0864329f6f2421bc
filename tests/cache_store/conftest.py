from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_store.store import ChunkStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store", limit_bytes=2**28) as store:
        yield store
