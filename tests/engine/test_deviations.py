"""Sums of deviations, and norms: the kernels in C against torch and float64."""

from itertools import pairwise

import pytest
import torch

from engine.kernels.native import NativeKernels
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Kernels
from engine.rope import Tables
from tests.engine.test_kernels import BF16, BUILT, native_only, randn

KERNELS = [
    pytest.param(PlainKernels, id="torch"),
    pytest.param(lambda: NativeKernels(BUILT), id="native", marks=native_only),  # type: ignore[arg-type]
]
LENGTH = 90


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = request.param()
    return made


def turning(turned: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """cos and sin of every position, scaled as some RoPEs' are."""
    angles = torch.outer(torch.arange(LENGTH).float(), torch.rand(max(turned // 2, 1)))
    cos, sin = 1.5 * angles.cos(), 1.5 * angles.sin()
    rows = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return rows if turned else None


def turned_by(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] rotated, in float64."""
    out, half = x.double().clone(), cos.shape[1] // 2
    a, b = x[..., :half].double(), x[..., half : 2 * half].double()
    out[..., :half] = a * cos[:, None, :half] + b * sin[:, None, :half]
    out[..., half : 2 * half] = b * cos[:, None, half:] + a * sin[:, None, half:]
    return out


@pytest.mark.parametrize(
    ("dim", "turned"), [(64, 64), (64, 32), (96, 24), (64, 0), (20, 20), (256, 256)]
)
def test_groups_of_deviations_are_added_up(kernels: Kernels, dim: int, turned: int) -> None:
    places = torch.tensor([3, 4, 9, 30, 31, 50, 88, 89])
    bounds = torch.tensor([0, 0, 3, 4, 4, 8])
    fresh_k, fresh_v = randn(8, 3, dim), randn(8, 3, dim, seed=1)
    rows = turning(turned)
    k, v = randn(3, LENGTH, dim, seed=2), randn(3, LENGTH, dim, seed=3)
    stored = k.transpose(0, 1)[places].double()
    back = None
    if rows is not None:  # what is in the cache was turned
        k = turned_by(k.transpose(0, 1), *rows).to(BF16).transpose(0, 1).contiguous()
        tables = Tables((rows,), (0,))[places].back()
        back = tables.layer(0)
    found = kernels.deviations(k, v, fresh_k, fresh_v, places, bounds, back)
    apart_k = fresh_k.double() - stored
    apart_v = fresh_v.double() - v.transpose(0, 1)[places].double()
    for n, (first, last) in enumerate(pairwise(bounds)):
        for part, apart in enumerate((apart_k, apart_v)):
            expected = apart[first:last].sum(0)
            # K that was turned has been rounded once on the way.
            atol = 0.1 if rows is not None and part == 0 else 1e-5
            torch.testing.assert_close(found[n, part].double(), expected, rtol=0, atol=atol)
    plain = PlainKernels().deviations(k, v, fresh_k, fresh_v, places, bounds, back)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 20, 64, 256])
def test_norms_of_rows(kernels: Kernels, size: int) -> None:
    x = randn(2, 3, 300, size)[1]
    found = kernels.norms(x[:, :290])  # heads lie apart
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x[:, :290].double().norm(dim=-1), rtol=1e-6, atol=0)
    assert torch.equal(kernels.norms(torch.zeros_like(x)), torch.zeros(3, 300))


@native_only
def test_threads_change_nothing() -> None:
    kernels, before = NativeKernels(BUILT), torch.get_num_threads()  # type: ignore[arg-type]
    places, bounds = torch.arange(0, LENGTH, 2), torch.tensor([0, 10, 11, 45])
    k, v, fresh = randn(3, LENGTH, 64), randn(3, LENGTH, 64, seed=1), randn(45, 3, 64, seed=2)
    results, rows = [], turning(64)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums = kernels.deviations(k, v, fresh, fresh, places, bounds, None)
            moved = k.clone(), v.clone()
            kernels.shift(*moved, torch.tensor([[0, 40], [40, 90]]), sums[:2], rows)
            results.append((sums, *moved, kernels.norms(v)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@native_only
def test_places_that_are_not_there_are_refused() -> None:
    kernels = NativeKernels(BUILT)  # type: ignore[arg-type]
    k, fresh = randn(3, LENGTH, 64), randn(2, 3, 64)
    places, bounds = torch.tensor([0, LENGTH]), torch.tensor([0, 2])
    with pytest.raises((IndexError, RuntimeError)):
        kernels.deviations(k, k, fresh, fresh, places, bounds, None)
