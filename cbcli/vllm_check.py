"""What `doctor` says of vLLM, which is an extra."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cbcli.checks import Check, installed_version
from cbcli.settings import Settings

FROM, BELOW = (0, 32), (0, 33)  # versions that the connector is for; pyproject.toml has them too
LONGEST = 120  # seconds to import the connector, and vLLM with it
_INSTALL = "pip install 'cacheblend[vllm]'"
_CONNECTOR = "import engine.vllm.connector"


def check_vllm(settings: Settings, *, thorough: bool) -> Iterator[Check]:
    """Whether it is here, of a version that fits, and, where it is the engine that is set and
    `thorough`, whether its connector can be imported: that takes some seconds."""
    version, wanted = installed_version("vllm"), settings.engine == "vllm"
    if version is None:
        if wanted:
            yield Check("vllm", "fail", "not here, and it is the engine that is set", _INSTALL)
        return
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    facts: dict[str, object] = {"version": version, "engine": settings.engine}
    if not FROM <= numbers < BELOW:
        needed = f"{'.'.join(map(str, FROM))} or later, below {'.'.join(map(str, BELOW))}"
        state, said = ("fail" if wanted else "warn"), f"{version}; the connector is for {needed}"
        yield Check("vllm", state, said, _INSTALL, facts)
        return
    if not (wanted and thorough):
        yield Check("vllm", "ok", version, facts=facts)
        return
    why = _why_not_importable()
    facts["connector"] = not why
    if why:
        yield Check(
            "vllm", "fail", f"{version}; its connector cannot be imported: {why}", "", facts
        )
    else:
        yield Check("vllm", "ok", f"{version}, its connector can be imported", facts=facts)


def _why_not_importable() -> str:
    """Tried in a process of its own: vLLM changes the one it is in. "" where it can be."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONNECTOR],
            capture_output=True,
            text=True,
            timeout=LONGEST,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {LONGEST} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""
