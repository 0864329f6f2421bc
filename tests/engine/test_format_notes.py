"""Quantised layers are as docs/format.md says: read here by its words, with numpy alone."""

import math

import numpy as np
import pytest
import torch

from cache_store.keys import KVSpec
from engine.codec import Codec

TOKENS, HEADS, DIM = 70, 2, 40  # neither fills its groups
GROUPS = {"fp8": 64, "int8": 64, "int4": 32}


def bf16(data: bytes) -> np.ndarray:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def part(data: bytes, steps: int) -> tuple[np.ndarray, np.ndarray, bytes]:
    return bf16(data[: 2 * steps]), bf16(data[2 * steps : 4 * steps]), data[4 * steps :]


def unpacked(data: bytes, dtype: str, runs: list[int]) -> tuple[np.ndarray, int]:
    """Codes of the runs, one after the other, and the bytes they take."""
    if dtype != "int4":
        raw = np.frombuffer(data, np.uint8)[: sum(runs)]
        if dtype == "int8":
            return raw.astype(np.float32), sum(runs)
        sign = np.where(raw & 0x80, -1.0, 1.0)
        exponent, fraction = (raw >> 3) & 15, raw & 7
        small = fraction / 8 * 2.0**-6
        large = (1 + fraction / 8) * 2.0 ** (exponent.astype(int) - 7)
        return sign * np.where(exponent, large, small), len(raw)
    found, place = [], 0
    for length in runs:
        half = math.ceil(length / 2)
        piece = np.frombuffer(data, np.uint8)[place : place + half]
        found.append(np.concatenate([piece & 15, piece >> 4])[:length])
        place += half
    return np.concatenate(found).astype(np.float32), place


@pytest.mark.parametrize("dtype", GROUPS)
def test_quantised_parts_are_as_the_notes_say(dtype: str) -> None:
    spec = KVSpec("m", "t", 1, HEADS, DIM, dtype)  # type: ignore[arg-type]
    codec, group, size = Codec.of(spec, torch.float32), GROUPS[dtype], HEADS * DIM
    torch.manual_seed(3)
    k, v = torch.randn(TOKENS, HEADS, DIM) * 3, torch.randn(TOKENS, HEADS, DIM)
    of_k, of_v = (bytes(data) for data in codec.encode(k, v))

    steps, bases, codes = part(of_k, math.ceil(TOKENS / group) * size)
    values, used = unpacked(codes, dtype, [size] * TOKENS)
    rows = np.arange(TOKENS) // group
    by_token = steps.reshape(-1, size)[rows], bases.reshape(-1, size)[rows]
    read_k = by_token[1] + by_token[0] * values.reshape(TOKENS, size)
    assert codes[used:] == bytes(-(len(of_k) - len(codes) + used) % 64)
    check(codec, of_k, False, read_k, k)

    groups = math.ceil(DIM / group)
    steps, bases, codes = part(of_v, TOKENS * HEADS * groups)
    lengths = [min(group, DIM - n * group) for n in range(groups)]
    values, used = unpacked(codes, dtype, lengths * (TOKENS * HEADS))
    columns = np.arange(DIM) // group
    scale = steps.reshape(TOKENS, HEADS, groups)[..., columns]
    base = bases.reshape(TOKENS, HEADS, groups)[..., columns]
    read_v = base + scale * values.reshape(TOKENS, HEADS, DIM)
    assert codes[used:] == bytes(-(len(of_v) - len(codes) + used) % 64)
    check(codec, of_v, True, read_v, v)


def check(codec: Codec, data: bytes, is_v: bool, read: np.ndarray, wanted: torch.Tensor) -> None:
    """What was read by the notes is what we decode, and near what was encoded."""
    out = torch.empty(wanted.numel())
    ours = codec.decode(memoryview(bytearray(data)), is_v, TOKENS, out).numpy()
    assert np.allclose(read.reshape(ours.shape), ours, rtol=1e-5, atol=1e-6)
    worst = {"fp8": 0.4, "int8": 0.05, "int4": 0.7}[codec.stored]
    assert np.abs(ours - wanted.numpy()).max() < worst
