"""What the measurements ran on, and whether anything else was running."""

import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.machine import mount_of, this_machine


@dataclass(frozen=True)
class Conditions:
    """cores: those this process may use; store_filesystem: of the store that is measured, ""
    where it is not known; busy_cores: how many cores others kept busy just before (None where
    the system does not say)."""

    cpu: str
    cores: int
    threads: int
    device: str
    torch: str
    python: str
    system: str
    store_filesystem: str
    busy_cores: float | None


def look_around(device: torch.device) -> Conditions:
    """Facts of this machine, `threads` as torch is set now. Takes a fifth of a second."""
    machine, mount = this_machine(), mount_of(Path(tempfile.gettempdir()))
    return Conditions(
        cpu=machine.cpu,
        cores=machine.usable,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        store_filesystem=mount.type if mount else "",
        busy_cores=_busy_cores(0.2),
    )


def _busy_cores(seconds: float) -> float | None:
    """How many cores are busy while this process sleeps so long."""

    def ticks() -> tuple[int, int]:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        fields = [int(field) for field in first.split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)  # all but idle and waiting

    try:
        busy, total = ticks()
        time.sleep(seconds)
        busy_after, total_after = ticks()
    except (OSError, ValueError, IndexError):
        return None
    return (busy_after - busy) / max(1, total_after - total) * (os.cpu_count() or 1)
