"""`cacheblend serve` in a process of its own, for tests of what it answers."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cbcli.terminal import run

START_SECONDS = 240
COMMAND = [sys.executable, "-c", "from cbcli.entry import main; main()"]
ROOT = Path(__file__).parent.parent.parent


def environment(home: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("CACHEBLEND_")}
    return own | {
        "CACHEBLEND_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }


def cacheblend(home: Path, *args: str) -> Any:
    """The JSON that a command prints, run in this process: another one than the server's."""
    done = run(*args, "--json", env={"CACHEBLEND_HOME": str(home)})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@dataclass
class Server:
    """A running one. ready: the line it printed; log: its standard error."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    log: Path
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def get(self, path: str) -> str:
        asked = urllib.request.Request(self.url + path, headers=self.headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            found = re.fullmatch(r"vllm:cacheblend_(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name:
                have = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if labels.items() <= have.items():
                    total += float(found[3])
        return total

    def wait_for(self, name: str, at_least: float, **labels: str) -> float:
        """Waits until a metric has risen that far: what follows an answer takes a moment."""
        until = time.monotonic() + 60
        while (value := self.metric(name, **labels)) < at_least and time.monotonic() < until:
            time.sleep(0.1)
        assert value >= at_least, f"{name} {labels} is {value}"
        return value

    def end(self, number: int = signal.SIGINT) -> int:
        """The exit code, after a signal as a terminal sends it: to all of its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(timeout=60)


def launch(home: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`cacheblend serve`, its standard error in `log` and its output beside it."""
    with log.open("w") as errors, log.with_suffix(".json").open("w") as data:
        return subprocess.Popen(
            [*COMMAND, "serve", *flags],
            env=environment(home),
            stdout=data,
            stderr=errors,
            start_new_session=True,
        )


def start(home: Path, model: str | Path, log: Path, *flags: str) -> Server:
    """Starts a server on any free port, and waits until it answers."""
    said = log.with_suffix(".json")
    process = launch(home, log, str(model), "--port", "0", "--json", *flags)
    try:
        until = time.monotonic() + START_SECONDS
        while not said.read_text().endswith("\n"):
            assert process.poll() is None, f"exit code {process.poll()}:\n{log.read_text()}"
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return Server(process, json.loads(said.read_text()), log)
