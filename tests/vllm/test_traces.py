"""Traces that workers of vLLM's server write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.trace.file import read
from tests.vllm.worlds import make_text


def test_a_servers_worker_records_what_it_blends(start: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    served = start(extra={"trace": "full", "trace_dir": str(folder)})
    text = make_text()
    served.ask(text.prompt([0, 1, 2]))  # all of it is missed, and nothing blended
    served.ask(text.prompt([2, 0, 1]), trace="basic")
    served.ask(text.prompt([1, 2, 0]))
    served.ask(text.prompt([1, 0, 2]), trace=False)
    served.close()
    first, second = (read(path) for path in sorted(folder.iterdir()))
    assert (first.level, second.level) == ("basic", "full")
    assert first.deviations is None
    assert second.deviations is not None
    assert first.result["engine"] == "vllm"
    assert first.result["first_token"] is None
    assert first.result["recomputed"]["tokens"] > 0
    assert [s["status"] for s in first.result["prompt"]["segments"]].count("hit") == 2
    assert first.tokens.ids.tolist() == list(text.prompt([2, 0, 1]).token_ids)
