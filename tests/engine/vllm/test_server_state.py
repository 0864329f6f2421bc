"""What a running server tells of itself."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cache_store.store import ChunkStore
from engine.vllm.server_state import ServerState


class Engine:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def collective_rpc(self, name: str) -> list[str | None]:
        self.asked.append(name)
        return [None, "the self-test failed"]


def test_workers_are_asked_once_why_blending_is_off(tmp_path: Path) -> None:
    """Else whoever asks the server holds up its engine."""
    ChunkStore.open(tmp_path / "store", limit_bytes=10**8).close()
    blueprint = SimpleNamespace(name="tiny")
    plan = SimpleNamespace(connector={"store": str(tmp_path / "store")}, blueprint=blueprint)
    args = SimpleNamespace(served_model_name=None, host="h", port=1)
    engine = Engine()
    state = ServerState(cast(Any, plan), engine, args, "0.32")
    for _ in range(2):
        assert asyncio.run(state.ready()).off == "the self-test failed"
    assert engine.asked == ["why_blending_is_off"]
