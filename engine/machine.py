"""What this process may use of the machine: cores, memory, and the file system under a folder.

Limits count as much as what is built in: a container is told of 64 cores and gets two.
"""

import os
import platform
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

# What torch's and our own kernels look for; the rest of a CPU's flags says nothing here.
FLAGS = (
    *("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16", "asimd", "asimdhp", "bf16", "i8mm", "sve"),
)
NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "sshfs")
)
IN_MEMORY = frozenset(("tmpfs", "ramfs"))


@dataclass(frozen=True)
class Machine:
    """cpu: its name; flags: those of `FLAGS` it has. cores: of the machine; allowed: those this
    process may run on, both with hyperthreads counted as cores; physical: the allowed ones without;
    quota: cores' worth of time it gets, None without a limit. memory: bytes it may use in all,
    available: now; None where the system doesn't say."""

    cpu: str
    flags: tuple[str, ...]
    cores: int
    allowed: int
    physical: int
    quota: float | None
    memory: int | None
    available: int | None

    @property
    def usable(self) -> int:
        """Threads that can compute at once; hyperthreads share what a core computes with."""
        if self.quota is None:
            return self.physical
        return max(1, min(self.physical, round(self.quota)))


@dataclass(frozen=True)
class Mount:
    """The file system a folder is on: its type and where it is mounted."""

    type: str
    at: Path


def this_machine(root: Path = Path("/")) -> Machine:
    """Asks the system. What can't be read counts as not limited or not known."""
    cpu, flags = _cpu(_text(root / "proc/cpuinfo"))
    cores = os.cpu_count() or 1
    allowed: Collection[int] = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(cores)
    )
    groups = list(_groups(root))
    memory, available = _memory(_text(root / "proc/meminfo"))
    for group in groups:
        limit, used = _group_memory(group)
        if limit is not None and (memory is None or limit < memory):
            memory = limit
        if limit is not None and used is not None:
            left = max(0, limit - used)
            available = left if available is None else min(available, left)
    quotas = [quota for group in groups if (quota := _group_quota(group)) is not None]
    return Machine(
        cpu or platform.processor() or platform.machine(),
        flags,
        cores,
        len(allowed),
        _physical(root / "sys/devices/system/cpu", allowed),
        min(quotas, default=None),
        memory,
        available,
    )


def mount_of(folder: Path, root: Path = Path("/")) -> Mount | None:
    """The file system that `folder`, or where it isn't there the nearest above it, is on."""
    try:
        place = nearest_existing(folder).resolve()
    except OSError:
        return None
    best: Mount | None = None
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        at = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[4]))
        # The one mounted last hides those below it.
        if place.is_relative_to(at) and (best is None or len(at.parts) >= len(best.at.parts)):
            best = Mount(kind[0].removeprefix("fuse."), at)
    return best


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there. Raises OSError as the disk does."""
    there = path.expanduser().absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _cpu(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    known: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip().lower(), value.strip())
    has = set(known.get("flags", known.get("features", "")).split())
    return known.get("model name", ""), tuple(flag for flag in FLAGS if flag in has)


def _physical(folder: Path, cpus: Iterable[int]) -> int:
    """How many cores these are; each is one where the system doesn't say."""
    siblings = "topology/thread_siblings_list"
    return len({_text(folder / f"cpu{cpu}" / siblings).strip() or str(cpu) for cpu in cpus})


def _memory(meminfo: str) -> tuple[int | None, int | None]:
    """Total and available bytes."""
    found: dict[str, int] = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdigit():
            found[name] = int(value.split()[0]) * 1024
    if "MemTotal" in found:
        return found["MemTotal"], found.get("MemAvailable", found.get("MemFree"))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    except (OSError, ValueError, AttributeError):
        return None, None


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control groups and of all groups above them."""
    found: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = {"cpu", "memory"} & set(controllers.split(","))
        if controllers and not names:
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.strip("/")
        while group.is_relative_to(top):
            found.append(group)
            group = group.parent
    return found


def _group_quota(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    if not quota:  # version 1
        quota = _text(group / "cpu.cfs_quota_us").strip()
        period = _text(group / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None  # "max" and -1: no limit


def _group_memory(group: Path) -> tuple[int | None, int | None]:
    """Limit and use in bytes."""
    limit = _text(group / "memory.max").strip()
    used = _text(group / "memory.current").strip()
    if not limit:  # version 1, where "no limit" is a number near 2**63
        limit = _text(group / "memory.limit_in_bytes").strip()
        used = _text(group / "memory.usage_in_bytes").strip()
    if not limit.isdigit() or int(limit) >= 2**60:
        return None, None
    return int(limit), int(used) if used.isdigit() else None
