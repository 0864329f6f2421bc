"""How many threads compute on the CPU."""

import os
from collections.abc import Mapping

import torch

from engine.machine import Machine, this_machine

# What torch, OpenMP and MKL are told by.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads(wanted: int | None) -> None:
    """Sets the threads of this process to `thread_count` of what is here."""
    torch.set_num_threads(thread_count(wanted, torch.get_num_threads(), this_machine(), os.environ))


def thread_count(
    wanted: int | None, present: int, machine: Machine, environ: Mapping[str, str]
) -> int:
    """`wanted`; else `present`, as torch is set, which heeds `VARIABLES`. Where none of them is set
    it is cut to the cores that can be used: torch knows of no container's quota."""
    if wanted is not None:
        return wanted
    if any(environ.get(name, "").strip() for name in VARIABLES):
        return present
    return min(present, machine.usable)
