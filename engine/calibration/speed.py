"""How fast a model computes and its KV comes."""

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from engine.machine import this_machine
from engine.threads import thread_count


@dataclass(frozen=True)
class Speed:
    """What a profile knows of a machine's speed with its model.

    machine, threads: where it was measured. prefill: (tokens, tokens a second) of full prefills.
    Recomputing n tokens of a prompt of N takes fixed_s + n token_s + n N pair_s a layer.
    token_layer_bytes: KV of a token in one layer. warm, cold: bytes a second from the page cache
    and from the disk, None where unknown.
    """

    machine: str
    threads: int
    prefill: tuple[tuple[int, float], ...]
    fixed_s: float
    token_s: float
    pair_s: float
    token_layer_bytes: float
    warm: float | None
    cold: float | None

    def recompute_s(self, computed: float, prompt: int) -> float:
        """Seconds a layer takes to compute so many of a prompt's tokens."""
        return self.fixed_s + computed * (self.token_s + prompt * self.pair_s)

    def load_s(self, tokens: int, bandwidth: float) -> float:
        """Seconds a layer's KV of so many tokens takes to come, at bytes a second."""
        return tokens * self.token_layer_bytes / bandwidth

    def holds(self, device: torch.device, threads: int | None) -> bool:
        """Whether it was measured on this machine's device and, where threads compute, with as
        many as an engine loaded with `threads` has."""
        if self.machine != here(device):
            return False
        present = torch.get_num_threads()
        count = thread_count(threads, present, this_machine(), os.environ)
        return device.type != "cpu" or self.threads == count

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Speed":
        """Raises KeyError, TypeError or ValueError for what isn't one."""
        made = cls(**{**value, "prefill": tuple((int(n), float(r)) for n, r in value["prefill"])})
        if not made.token_layer_bytes > 0 or made.recompute_s(1, 1) < 0:
            raise ValueError("a speed below zero")
        return made


def here(device: torch.device) -> str:
    """The machine and device, as far as a speed depends on them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().cpu
    return f"{device.type}: {name or platform.machine()}"
