"""Traces that a worker writes, where something goes wrong."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.vllm import tracing
from engine.vllm.tracing import TraceWriter


def test_a_thread_that_cannot_start_fails_no_blend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NoThread:
        def __init__(self, *given: Any) -> None:
            return

        def submit(self, *given: Any) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tracing, "ThreadPoolExecutor", NoThread)
    said: list[str] = []
    nothing = cast(Any, None)
    writer = TraceWriter(nothing, nothing, nothing, nothing, said.append)
    for _ in range(9):
        writer.ran(
            cast(Any, SimpleNamespace(plan=SimpleNamespace(request=SimpleNamespace(trace="basic"))))
        )
    assert said == ["a run was not recorded: can't start new thread"] * 9
