"""How many threads compute on the CPU."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from engine.machine import Machine, this_machine

# What torch, OpenMP and MKL are told by.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads(wanted: int | None, sharing: int = 1) -> None:
    """Sets the threads of this process to `thread_count` of what is here."""
    present = torch.get_num_threads()
    torch.set_num_threads(thread_count(wanted, present, this_machine(), os.environ, sharing))


def thread_count(
    wanted: int | None,
    present: int,
    machine: Machine,
    environ: Mapping[str, str],
    sharing: int = 1,
) -> int:
    """`wanted`; else `present`, as torch is set, which heeds `VARIABLES`, cut to the cores that can
    be used where none of them is set, for torch knows of no container's quota. Divided between so
    many processes as are `sharing` them: more threads than cores make each of them crawl."""
    if wanted is not None:
        return wanted
    told = any(environ.get(name, "").strip() for name in VARIABLES)
    return max(1, (present if told else min(present, machine.usable)) // sharing)


def use_all_cores() -> None:
    """Lets the calling thread run on every core that any thread of this process may run on.

    Where OpenMP binds its threads to cores, the one that computes is among them, and a thread that
    it starts would stay on its core, and in its way.
    """
    if cores := _cores_of(os.getpid()):
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


@cache
def _cores_of(process: int) -> frozenset[int]:
    """This process's, looked up once; empty where the system doesn't tell."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it may have ended
                found |= os.sched_getaffinity(int(thread.name))
    return frozenset(found)
