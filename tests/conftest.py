"""Fixtures shared by all tests: a home of their own, tiny models, the real default model."""

import os
import signal
from pathlib import Path

import pytest

MODELS = Path(
    os.environ.get("CACHEBLEND_TEST_MODELS", Path(__file__).parent.parent / ".cache/models")
)


# Before any fixture runs: what the caller has set is not the tests' business.
for _name in [name for name in os.environ if name.startswith("CACHEBLEND_")]:
    if _name != "CACHEBLEND_STRESS":  # how much the tests do, not what they test
        del os.environ[_name]


# A shell that starts us in the background has Ctrl-C ignored, and so would be all we start.
signal.signal(signal.SIGINT, signal.default_int_handler)


VLLM = Path(__file__).parent / "vllm"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """vLLM changes threads and global state of its process: its tests are run only where they are
    named, by a pytest of their own."""
    if collection_path != VLLM:
        return None
    named = (config.invocation_params.dir / arg.split("::")[0] for arg in config.args)
    return None if any(path.resolve().is_relative_to(VLLM) for path in named) else True


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's settings, models or store."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CACHEBLEND_HOME", str(home / "cacheblend"))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The real default model; `make test` fetches it once."""
    path = MODELS / "smollm2-135m"
    if not (path / "config.json").is_file():
        pytest.fail(f"{path} is missing: run `make test`, which gets the default model first")
    return path


@pytest.fixture(scope="session")
def gemma_model_dir() -> Path:
    """The real Gemma 3, where somebody has pulled it: `cacheblend models pull gemma3-270m`."""
    path = MODELS / "gemma3-270m"
    if not (path / "config.json").is_file():
        pytest.skip(f"{path} is not there")
    return path
